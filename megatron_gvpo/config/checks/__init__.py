"""Checks of a configuration that load nothing heavy: against itself, the model's config.json and the disk."""
