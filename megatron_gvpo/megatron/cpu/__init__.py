"""Stand-ins that let unmodified megatron-core run on CPU with gloo. Never loaded where there is CUDA.

`device.install()` answers the device questions that megatron-core asks of CUDA, `spec`, `attention` and
`norm` hold the local layers that replace Transformer Engine's, `collectives` has what gloo lacks, `bridge`
lets Megatron-Bridge be imported without Transformer Engine.
"""
