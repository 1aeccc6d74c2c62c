"""Everything that imports megatron.core:
model, forward pass, optimizer, checkpoints, and its way on a CPU.
"""
