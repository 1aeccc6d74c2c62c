"""Replacements that let unmodified megatron-core run on CPU with gloo; never loaded on a machine with CUDA.

`device.install()` replaces the `torch.cuda` functions that megatron-core calls. `spec`, `packed_attention`
and `norm` hold the local layers that replace Transformer Engine's. `uneven_collectives` has the collectives
that gloo lacks. `bridge` imports Megatron-Bridge without Transformer Engine.
"""
