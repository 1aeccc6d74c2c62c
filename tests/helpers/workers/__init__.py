"""Rank functions that `distributed.launch` runs on one or several ranks."""
