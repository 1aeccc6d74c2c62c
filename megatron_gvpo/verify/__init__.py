"""Compares this package's build of an architecture with transformers: `megatron-gvpo verify`."""
