"""All code that imports megatron.core: model, forward pass, optimizer, checkpoints; on GPUs and on CPUs."""
