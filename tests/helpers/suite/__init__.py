"""Plugins of pytest: how the suite itself is run."""
