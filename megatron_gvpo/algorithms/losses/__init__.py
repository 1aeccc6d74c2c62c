"""Losses, a block each."""
