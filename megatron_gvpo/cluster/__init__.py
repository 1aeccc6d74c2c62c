"""Launching on clusters, and saying beforehand what to expect there."""
