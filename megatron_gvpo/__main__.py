"""Runs the command line as `python -m megatron_gvpo`; torchrun starts the ranks this way, too."""

import os
import sys

# `python -m` looks for modules in the current directory first, where a user's random.py or types.py would
# hide Python's own. It comes last, so that `module:function` in a configuration is still found.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    sys.path.append(sys.path.pop(0))

# A thread of OpenMP would spin while it waits for one that the scheduler has taken away: beside one busy
# process a step took three times as long (docs/explanation/cpu_speed.md). torch reads it when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

try:
    from megatron_gvpo.cli import main
    from megatron_gvpo.core.redaction import hide

    code = main()
except KeyboardInterrupt:
    sys.exit(130)  # Ctrl-C where no handler of ours catches it
except SystemExit:
    raise
except BaseException:  # a panic in a Rust library, such as tokenizers, is not an Exception
    import traceback

    print(hide(traceback.format_exc()), end="", file=sys.stderr)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # at once: libraries' exit handlers may wait for the other ranks
sys.exit(code)
