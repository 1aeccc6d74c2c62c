"""Adapters (LoRA) of a Megatron model."""
