"""A CUDA without a GPU: one C library that, loaded before PyTorch, answers in place of driver and runtime.

README.md says what it answers and what it cannot. `build` compiles it, `environment` gives the variables of a
process that uses it, and `counters` reads what the process has asked of the device.
"""

from __future__ import annotations
