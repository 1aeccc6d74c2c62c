"""Settings of the fuzz suite: some examples in `make test`, thousands in `make proof` (--every-part)."""

import pytest
from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def pytest_configure(config: pytest.Config) -> None:
    """Make the profile `fuzz` before the tests are imported; other suites keep their own settings."""
    every = config.getoption("every_part")
    settings.register_profile(
        "fuzz",
        max_examples=4000 if every else 25,
        derandomize=not every,
        deadline=None,
        database=None,
        suppress_health_check=SLOW,
    )
