"""`megatron-gvpo serve --tinker`: the Tinker API in front of the trainer, for loops that others write."""
