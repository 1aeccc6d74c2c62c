"""Saves, finds and loads sharded checkpoints."""
