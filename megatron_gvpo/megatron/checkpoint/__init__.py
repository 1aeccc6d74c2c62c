"""Sharded checkpoints: saved, found and loaded."""
