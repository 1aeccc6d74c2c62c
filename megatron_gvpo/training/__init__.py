"""The training loop: a step, its checkpoints, callbacks, evaluation, and conversion of checkpoints."""

from megatron_gvpo.training.environment import quieten_libraries

quieten_libraries()  # called first, because many libraries warn when they are imported
