"""Runs the part of a command that loads torch, Megatron and a model; shared by the commands that do."""

from __future__ import annotations

import signal
from collections.abc import Callable

from megatron_gvpo.cli.terminal import loading, quieten, refuse, say
from megatron_gvpo.config.errors import ConfigError


def run_with_model(work: Callable[[], None]) -> int:
    """Load the libraries, do the work, leave the process group; returns the exit code.

    Errors that a user can mend are printed as one line. All others are raised, and the process group is left
    as it is: the error may be this rank's alone, and the other ranks be waiting for it.
    """
    quieten()
    with loading("torch"):
        import torch  # noqa: F401
    with loading("Megatron"):
        from megatron_gvpo.megatron.checkpoint.sharded import CheckpointError
        from megatron_gvpo.megatron.parallel import shut_down
    with loading("transformers"):
        from megatron_gvpo.callbacks import OutputError
        from megatron_gvpo.data.prompts import DataError
        from megatron_gvpo.rollout.request import RolloutError
        from megatron_gvpo.runtime.signals import Interrupted

    code = 0
    try:
        work()
    except Interrupted:
        say("stopped on request; the checkpoint is complete: continue with `train ... --resume`")
    except (ConfigError, DataError) as error:
        code = refuse(error)
    except (CheckpointError, OutputError, RolloutError) as error:
        code = refuse(error, code=1)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    shut_down()
    return code
