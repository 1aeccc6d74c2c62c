"""Builds a Megatron model, loads its weights and exports them."""
