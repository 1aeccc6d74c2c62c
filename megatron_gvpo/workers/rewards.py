"""The handler of reward functions: it evaluates rollouts one by one, and names calls that import modules."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from megatron_gvpo.core.plain_values import NoNumberError, real_number
from megatron_gvpo.core.user_functions import check_signature, described, load_function
from megatron_gvpo.workers.messages import (
    MAX_TEXT,
    CallError,
    CallResult,
    Importing,
    Load,
    Ready,
    Scores,
    WireError,
    read_prompt,
    read_rollout,
)
from megatron_gvpo.workers.worker import Worker

Reward = Callable[..., Any]
# Parameters of reward functions of other trainers, which get all responses, or a text, and not two objects.
_FOREIGN = {"completions": "TRL's", "completion": "TRL's", "solution_str": "verl's", "data_source": "verl's"}


def load(spec: str, options: Mapping[str, Any]) -> Reward:
    """The function that `spec` names, with its options bound. Raises ValueError."""
    function = load_function(spec)
    check_reward(function, options)
    return partial(function, **options)


def check_reward(function: Reward, options: Mapping[str, Any]) -> None:
    """Raises ValueError for a function that cannot be called as a reward with these options."""
    for name in inspect.signature(function).parameters:
        if (form := _FOREIGN.get(name)) is not None and name not in options:
            raise ValueError(
                f"its argument {name} is that of {form} rewards; here a reward is "
                "f(prompt, rollout, **options) and returns a number (docs/howto/migrate.md)"
            )
    check_signature(function, "f(prompt, rollout, **options)", 2, options)


def serve(worker: Worker, functions: Sequence[Reward], load: Load) -> None:
    """Answer call by call, so that the trainer always knows which call ended the process."""
    _Scorer(worker, functions, load.notice).serve()


class _Scorer:
    def __init__(self, worker: Worker, functions: Sequence[Reward], notice: float) -> None:
        self._worker, self._functions, self._notice = worker, functions, notice
        self._running: int | None = None  # number of the call whose function is running

    def serve(self) -> None:
        threading.Thread(target=self._tell_of_imports, daemon=True).start()
        self._worker.send(Ready())
        while True:
            order = self._worker.receive()
            if not isinstance(order, Scores):
                raise WireError("an order that is not Scores")
            for score in order.calls:
                self._worker.announce(score.function)
                self._running = score.call
                parts = order.parts[score.prompt], order.parts[score.rollout]
                reply = _evaluate(self._functions[score.function], score.call, *parts)
                self._running = None
                self._worker.send(reply)

    def _tell_of_imports(self) -> None:
        """Send notices while a function imports a module, because the call's limit excludes this time."""
        main = threading.main_thread().ident
        assert main is not None
        while True:
            time.sleep(self._notice)
            if (call := self._running) is not None and _is_importing(main):
                with suppress(OSError):
                    self._worker.send(Importing(call))


def _is_importing(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _evaluate(function: Reward, call: int, prompt: bytes, rollout: bytes) -> CallResult | CallError:
    """The reward, or the reason why there is none, whatever the function does short of ending the process."""
    try:
        value = function(read_prompt(prompt), read_rollout(rollout))
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return CallResult(call, real_number(value))
    except NoNumberError as error:
        return CallError(call, f"it returned {error}"[:MAX_TEXT])
    except BaseException as error:
        return CallError(call, described(error)[:MAX_TEXT])
