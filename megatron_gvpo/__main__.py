"""Runs the command line as `python -m megatron_gvpo`; torchrun starts the ranks this way, too."""

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
    os._exit(1)  # at once: libraries' exit handlers may wait for the other ranks
sys.exit(code)
