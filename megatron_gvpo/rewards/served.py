"""Scores responses by reward models and judges on servers: rank 0 sends requests, all ranks get verdicts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from aiohttp import ClientSession

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.groups import LOST, Group, Prompt, Rollout
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.rewards.judge import Judge, as_text, prompt_messages, scored_chat
from megatron_gvpo.rewards.reward_model import RewardModel
from megatron_gvpo.runs.record import fingerprint
from megatron_gvpo.servers.launch.start import report
from megatron_gvpo.servers.leader import ModelClient
from megatron_gvpo.servers.model_requests import Servers, Verdict
from megatron_gvpo.servers.model_servers import Checkpoint, open_servers
from megatron_gvpo.settings.reward_servers import JudgeConfig, RewardModelConfig, key_of
from megatron_gvpo.settings.rewards import RewardsConfig
from megatron_gvpo.types import OnWait


class _ServedComponent(NamedTuple):
    """One component, on rank 0."""

    name: str
    model: RewardModel | Judge
    servers: Servers
    constants: dict[str, float]  # metrics that stay the same during the run


class ServedRewards(ModelClient):
    """Scores responses with the components on servers. Without such components it does nothing."""

    def __init__(
        self,
        rewards: RewardsConfig,
        cards: ModelCards,
        output_dir: str,
        first_gpus: Mapping[str, int],
    ) -> None:
        """`output_dir`: the run's, which gets the servers' logs.

        `first_gpus`: the first GPU of each section's servers, by the key of the section.
        """
        self._components = rewards.components if rewards.is_served else ()
        self._cards, self._output_dir, self._first_gpus = cards, output_dir, first_gpus
        super().__init__("reward client")
        self._served: list[_ServedComponent] = []
        self.metrics: dict[str, float] = {}  # metrics of the last batch, on rank 0

    def __enter__(self) -> Self:
        return super().__enter__() if self._components else self

    def score(self, groups: Sequence[Group], others: Callable[[], None], on_wait: OnWait = None) -> None:
        """Add the components' scores to the rewards that `others()` fills in meanwhile.

        A response that a component could not score is lost: it has the finish reason "lost", and the cause as
        its text. Raises RolloutError.
        """
        if not self._components:
            others()
            return
        begin_s = time.perf_counter()
        rows = self.answer(lambda: self._ask_all(groups), on_wait, others)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout, verdicts in zip(rollouts, rows, strict=True):
            self._record(rollout, {name: Verdict(*verdict) for name, verdict in verdicts.items()})
        if self._loop is not None:
            self._set_metrics(time.perf_counter() - begin_s)

    def _record(self, rollout: Rollout, verdicts: dict[str, Verdict]) -> None:
        """Set the rollout's rewards, or mark it as lost."""
        scored = dict(rollout.rewards)
        for name, verdict in verdicts.items():
            if verdict.score is None:
                rollout.finish_reason, rollout.text = LOST, f"reward {name}: {verdict.explanation}"
                return
            scored[name] = verdict.score
            if verdict.explanation:
                rollout.explanations[name] = verdict.explanation
        rollout.rewards = {c.name: scored[c.name] for c in self._components}  # in the configuration's order
        rollout.reward = sum((c.weight * scored[c.name] for c in self._components), 0.0)

    def _set_metrics(self, seconds: float) -> None:
        self.metrics = {"reward/served_s": seconds}
        for name, model, servers, constants in self._served:
            values = {
                "requests": servers.requests,
                "failed_requests": servers.failures,
                **model.metrics,
                **constants,
            }
            self.metrics |= {f"reward/{name}/{key}": float(value) for key, value in values.items()}

    async def _ask_all(self, groups: Sequence[Group]) -> list[dict[str, Verdict]]:
        """The verdicts of each response, by component."""
        pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        columns = await asyncio.gather(*(self._ask(component, pairs) for component in self._served))
        names = [component.name for component in self._served]
        return [dict(zip(names, verdicts, strict=True)) for verdicts in zip(*columns, strict=True)]

    async def _ask(
        self, component: _ServedComponent, pairs: Sequence[tuple[Prompt, Rollout]]
    ) -> list[Verdict]:
        """One component's verdicts; equal responses to a prompt are scored once."""
        first: dict[tuple[str, str], int] = {}  # index of the request for each conversation
        requests: list[Any] = []
        indices = []  # index of each pair's request
        for prompt, rollout in pairs:
            messages = scored_chat(prompt, rollout)
            key = (prompt.id, repr(messages))
            if key not in first:
                first[key] = len(requests)
                is_judge = isinstance(component.model, Judge)
                requests.append(self._fields(prompt, rollout) if is_judge else (prompt.id, messages))
            indices.append(first[key])
        verdicts = await component.model.verdicts(component.servers, requests)
        return [verdicts[index] for index in indices]

    def _fields(self, prompt: Prompt, rollout: Rollout) -> dict[str, str]:
        """The fields that a judge's template may name."""
        messages = rollout.messages or [{"role": "assistant", "content": rollout.text}]
        return {
            **{key: str(value) for key, value in prompt.record.items()},
            "prompt": as_text(prompt_messages(prompt)),
            "response": as_text(messages),
            "answer": prompt.answer or "",
        }

    def start_servers(self, session: ClientSession) -> Coroutine[Any, Any, None]:
        for i, component in enumerate(self._components):
            if component.served is None:
                continue
            key = key_of(i, component.served)
            model = (
                RewardModel(
                    component.served, key, _tokenizer(component.served, key), self._cards.component(i)
                )
                if isinstance(component.served, RewardModelConfig)
                else Judge(component.served, key)
            )
            settings, section = component.served.servers, f"{key}.servers"
            card = None if settings.urls else self._cards.component(i)
            opened = open_servers(
                section,
                settings,
                _checkpoint(component.served, card),
                self._output_dir,
                self._first_gpus[section],
                report,
                "reward server",
            )
            if opened.supervisor is not None:
                self._opened.callback(opened.supervisor.close)
            check = partial(model.check, timeout=settings.request_timeout)
            servers = Servers(opened, settings, session, check)
            self._served.append(
                _ServedComponent(component.name, model, servers, _hash(component.served.path))
            )
        return self._check_all()

    async def _check_all(self) -> None:
        await asyncio.gather(*(component.servers.check_all() for component in self._served))


def _hash(path: str | None) -> dict[str, float]:
    """A hash of a model's files as a metric, which shows a replaced model; empty without its files."""
    hashes = None if path is None else fingerprint(Path(path))
    return {} if hashes is None else {"model_hash": float(int(hashes["sha256"][:8], 16))}


def _checkpoint(served: RewardModelConfig | JudgeConfig, card: ModelCard | None) -> Checkpoint | None:
    """The model that servers start with; None if the run starts none."""
    if served.path is None or card is None:
        return None
    generates = not isinstance(served, RewardModelConfig)
    return Checkpoint(served.path, card, served.dtype, served.trust_remote_code, generates)


def _tokenizer(served: RewardModelConfig, key: str) -> Any:
    try:
        return load_tokenizer(served.path, served.trust_remote_code)
    except DataError as error:
        raise ConfigError(str(error).replace("model.path=", f"{key}.path=", 1)) from None
