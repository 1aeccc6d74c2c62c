"""Settings of Hypothesis: the same few examples in each `make test`, thousands of others in `make proof`.

CI tries the same examples each time, however long they take, so that only the change makes a difference.
`make proof` looks for others in the fuzz suite; failing ones are added to the tests as an `@example`.
`make test OPTIONS="--fuzz 4000"` looks for more by hand.
"""

import pytest
from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, metavar="N", help="try N random examples in each fuzz test")


def pytest_configure(config: pytest.Config) -> None:
    """Make the profiles before the tests are imported: `fuzz`, and the one on which other suites build."""
    random = config.getoption("fuzz")
    same = {
        "derandomize": not random,
        "deadline": None,
        "database": None,
        "suppress_health_check": SLOW,
    }
    settings.register_profile("fuzz", max_examples=random or 25, **same)
    settings.register_profile("others", **same)
    settings.load_profile("others")
