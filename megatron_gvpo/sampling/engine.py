"""A rollout engine samples responses from the policy: the protocol, and the engines by name.

A new engine needs a class with the methods of `RolloutEngine`, built as `EngineClass` says, and
an entry in `ENGINES`. Nothing here loads torch, so the configuration may ask for the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Never, Protocol, Self

from megatron_gvpo.core.lazy_imports import load_class
from megatron_gvpo.settings.servers import ENGINES
from megatron_gvpo.types import OnWait

if TYPE_CHECKING:
    from megatron_gvpo.data.task import Task
    from megatron_gvpo.groups import Group, Prompt
    from megatron_gvpo.huggingface.card import ModelCards
    from megatron_gvpo.megatron.scorer import Scorer
    from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig, SamplingConfig


class RolloutEngine[Ticket](Protocol):
    """Samples from the policy's weights: `ServedEngine` by servers, `EmbeddedEngine` in this process.

    A context manager: it samples only inside `with`. Every rank calls every method with the same arguments,
    and gets the same groups.
    """

    @property
    def version(self) -> int:
        """The version of the weights from which the engine samples; -1 without weights."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last `sync`, on rank 0; empty if there are none."""

    @property
    def shares_gpus(self) -> bool:
        """True where the engine has the trainer's own GPUs, so that only one of the two works at a time."""

    def sync(self, version: int) -> None:
        """Give the engine the policy's present weights, as `version`. A collective. Raises RolloutError."""

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int) -> Ticket:
        """Ask for `n` responses to each prompt; returns a ticket at once.

        Raises ValueError for a prompt that the model cannot take.
        """

    def wait_for(
        self, tickets: Sequence[Sequence[Ticket]], count: int, due: int, on_wait: OnWait = None
    ) -> list[int]:
        """Wait until `count` entries of `tickets`, the first `due` among them, are complete.

        Returns the indices of the first `count` complete entries. The engine does not sleep afterwards. Only
        engines that continue responses under later weights have this method. A collective. Raises
        RolloutError.
        """

    def collect(self, tickets: Sequence[Ticket], on_wait: OnWait = None) -> list[Group]:
        """The tickets' groups, in the order of tickets and prompts. A collective. Raises RolloutError.

        A rollout has the engine's log-probs at the sampling temperature (over the supports where `sampling`
        wants these, otherwise before top-p), its text, and the version of the weights that sampled it. While
        it waits, the engine calls `on_wait` on every rank at
        once from time to time; an error of `on_wait` ends the wait.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class NoEngine:
    """The engine of a run that samples nothing, such as supervised fine-tuning without held-out prompts."""

    version = -1
    shares_gpus = False

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def sync(self, version: int) -> None:
        pass

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int) -> Never:
        raise AssertionError("this run has no rollout engine")

    def wait_for(
        self, tickets: Sequence[Sequence[Never]], count: int, due: int, on_wait: OnWait = None
    ) -> list[int]:
        raise AssertionError("this run has no rollout engine")

    def collect(self, tickets: Sequence[Never], on_wait: OnWait = None) -> list[Group]:
        raise AssertionError("this run has no rollout engine")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


if TYPE_CHECKING:
    # The constructor of an engine: its arguments are (model, rollout, output_dir, cards, task, policy).
    EngineClass = Callable[[ModelConfig, RolloutConfig, str, ModelCards, Task, Scorer], RolloutEngine[Any]]


def engine_class(name: str) -> EngineClass:
    """The engine of this name, a key of ENGINES. Imports its module, which loads torch."""
    engine: EngineClass = load_class(ENGINES[name])
    return engine
