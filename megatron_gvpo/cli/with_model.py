"""Runs the part of a command that loads torch, Megatron and a model, for all commands that need them."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable

from megatron_gvpo.cli.terminal import loading, refuse, say
from megatron_gvpo.core.errors import CheckpointError, ConfigError, DataError, RewardError, RolloutError
from megatron_gvpo.core.lazy_imports import heavy_imports
from megatron_gvpo.training.environment import quieten


def run_with_model(work: Callable[[], None]) -> int:
    """Load the libraries, do the work, leave the process group; returns the exit code.

    Errors that a user can mend are printed as one line, and all others raised. For these, for an error in a
    user's function, and for a model whose logits are not finite, the process group is left as it is: the
    error may be this rank's alone, and the other ranks be waiting for it.
    """
    quieten()
    with loading("torch"), heavy_imports():
        import torch  # noqa: F401
    with loading("Megatron"), heavy_imports():
        from megatron_gvpo.megatron import parallel  # before megatron-core itself, which it prepares
    with loading("transformers"), heavy_imports():
        from megatron_gvpo.core.signals import Interrupted
        from megatron_gvpo.core.user_functions import UserFunctionError
        from megatron_gvpo.data.image_files import ImageError
        from megatron_gvpo.runs.hub import HubError
        from megatron_gvpo.training.callbacks import OutputError
    gc.freeze()  # the libraries' objects live to the end, so later collections need not search them

    code = 0
    try:
        work()
    except Interrupted as stopped:
        say(f"stopped on request; {stopped}: continue with `train ... --resume`")
    except (ConfigError, DataError) as error:
        code = refuse(error)
    except (CheckpointError, HubError, ImageError, OutputError, RewardError, RolloutError) as error:
        code = refuse(error, code=1)
    except (UserFunctionError, FloatingPointError) as error:
        return refuse(error, code=1, everywhere=True)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    parallel.shut_down()
    return code
