"""Settings of the fuzz suite: the same few examples in each `make test`, thousands of others in `make proof`.

CI tries the same examples each time, so that a change is judged by what it changed. `make proof` looks for
others; what it finds becomes an `@example`. `make test OPTIONS="--fuzz 4000"` looks for more by hand.
"""

import pytest
from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, metavar="N", help="try N random examples in each fuzz test")


def pytest_configure(config: pytest.Config) -> None:
    """Make the profile `fuzz` before the tests are imported; other suites keep their own settings."""
    random = config.getoption("fuzz")
    settings.register_profile(
        "fuzz",
        max_examples=random or 25,
        derandomize=not random,
        deadline=None,
        database=None,
        suppress_health_check=SLOW,
    )
