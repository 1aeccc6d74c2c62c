"""vLLM tells experts with its newer model runner alone, whose kernels are Triton's: here, interpreted.

For tests alone. Python imports this first in each of the server's processes: vLLM looks for a Triton that
knows the CPU when it is imported itself. What the kernels compute stays vLLM's own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

backends["cpu"] = next(iter(backends.values()))
