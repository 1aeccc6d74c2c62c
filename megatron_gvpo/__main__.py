"""Runs the command line as `python -m megatron_gvpo`; torchrun starts the ranks this way, too."""

import os
import sys

# `python -m` looks for modules in the current directory first, where a user's random.py or types.py would
# hide Python's own. It comes last, so that `module:function` in a configuration is still found.
try:
    is_first = not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]
except FileNotFoundError:  # the current directory was removed
    is_first = False
if is_first:
    sys.path.append(sys.path.pop(0))

try:
    from megatron_gvpo.cli import main

    code = main()
except KeyboardInterrupt:
    code = 130  # the exit code of Ctrl-C if no handler caught it
sys.exit(code)
