"""A CUDA without a GPU: one C library that, loaded before PyTorch, answers in place of driver and runtime.

README.md lists the functions that it answers and its limits. `build` compiles it, `environment` gives the
variables of a process that uses it, and `counters` reads the numbers of the process's calls to the device.
"""

from __future__ import annotations
