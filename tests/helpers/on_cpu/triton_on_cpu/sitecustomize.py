"""Interprets the Triton kernels of vLLM's newer model runner, which alone returns routed experts.

Only tests use it. Python imports this module first in each of the server's processes, because vLLM looks for
a Triton that knows the CPU during its own import. The kernels' code stays vLLM's own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

backends["cpu"] = next(iter(backends.values()))
