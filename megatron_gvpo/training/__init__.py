"""The training loop: a step, its checkpoints, callbacks, evaluation, and conversion of checkpoints."""
