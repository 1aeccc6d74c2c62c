"""Tiny models, data, configurations and runs that are made for tests."""
