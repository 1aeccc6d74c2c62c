"""Replacements that let unmodified megatron-core run on CPU with gloo; never loaded on a machine with CUDA.

`device.install()` replaces the `torch.cuda` functions that megatron-core calls, and the collectives that gloo
lacks. `spec`, `packed_attention`, `rotary`, `gated_delta` and `vision` hold the local layers that replace
Transformer Engine's. `bridge` imports Megatron-Bridge without Transformer Engine.
"""
