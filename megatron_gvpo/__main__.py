"""`python -m megatron_gvpo`, which is also what torchrun starts."""

import os
import sys
import traceback

from megatron_gvpo.cli import main

try:
    code = main()
except Exception:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        raise
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # at once: what libraries have left for the end may wait for the other ranks
sys.exit(code)
