"""Fill $TRITON_CACHE_DIR with the C file that Triton compiles when it first meets a GPU.

The image has no compiler to do it then. Triton finds it again by its source and by what Python says of the
machine, which differs with whether the program `file` is installed: so it is compiled for both answers.
"""

import platform

from triton.backends.nvidia.driver import CudaUtils
from triton.runtime import build

bits, _ = platform.architecture()
for linkage in ("", "ELF"):
    platform.architecture = lambda *_, linkage=linkage: (bits, linkage)
    build.platform_key.cache_clear()
    CudaUtils()
