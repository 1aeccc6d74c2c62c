"""The error that every wrong configuration raises; it imports nothing."""


class ConfigError(ValueError):
    """The configuration cannot run. The message names the key, its value and what would be right."""
