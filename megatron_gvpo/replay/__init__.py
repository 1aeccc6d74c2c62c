"""Computes a recorded step again, and names the first number that differs: `megatron-gvpo replay`."""
