"""The rows of an optimizer update, from rollouts that a run has saved: their lengths, groups and rewards.

A rollout file leaves out the experts of a router's replay, truncated sampling's supports, and the part of its
context that a turn of a conversation has kept; it only names images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe.rollouts.reader import DIRECTORY, read_file, saved_steps
from megatron_gvpo.observe.rollouts.schema import file_name
from megatron_gvpo.settings.config import Config
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from megatron_gvpo.megatron.policy import Policy

_COLUMNS = (
    *("group", "prompt", "response", "prompt_ids", "response_ids", "prompt_tokens", "response_tokens"),
    *("reward", "rewards", "weight", "source", "version_first", "rollout_logprobs", "finish_reason"),
    *("images", "turns"),
)


@dataclass(frozen=True)
class SavedRollouts:
    """The groups of a step that a run has saved in `file`."""

    file: Path
    groups: list[Group]

    def rows(self, config: Config) -> TrainBatch:
        """The rows of one of the step's updates: of the mini-batch with the most tokens.

        Mini-batches are those of the trainer: equally many groups each, in the order of the file. Responses
        that were not trained are left out. Raises ConfigError if that leaves none.
        """
        count, total = config.train.mini_batches, len(self.groups)
        bounds = [total * i // count for i in range(count + 1)]
        batches = [self.groups[bounds[i] : bounds[i + 1]] for i in range(count)]
        fullest = max(batches, key=lambda groups: sum(map(_tokens, groups)))
        rows = TrainBatch.from_groups(fullest, 0, config.rewards.turn_weight).trained()
        if not len(rows):
            raise ConfigError(f"--rollouts {self.file}: no response of its fullest mini-batch was trained")
        return rows


def sizes(policy: Policy, config: Config, rows: TrainBatch) -> dict[str, int]:
    """Count an update's groups and responses, and this rank's micro-batches and their tokens.

    `fullest`: the tokens of the micro-batch that has the most.
    """
    from megatron_gvpo.megatron.batch import PackedBatch
    from megatron_gvpo.megatron.microbatch import my_share

    model = policy.model
    budget = config.train.max_tokens_per_micro_batch * config.parallel.cp
    share = my_share(model, rows, budget, config.algorithm.loss.couples_groups)
    packs = [PackedBatch.pack(p, model.padding, model.shares_prompts_of(p)) for p in share.packs(rows)]
    tokens = [len(pack.token_t) for pack in packs]
    return {
        "groups": len(rows.groups[1]),
        "responses": len(rows),
        "micro_batches": len(tokens),
        "tokens": sum(tokens),
        "fullest": max(tokens),
    }


def load(path: str) -> SavedRollouts:
    """Read a file of rollouts, or the last training step's in a run's output directory or in its folder.

    Raises ConfigError if there is none, and for a file that cannot be rehearsed.
    """
    file = _file(Path(path))
    try:
        table = read_file(file, _COLUMNS)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"--rollouts {path}: {error}") from None
    records = table.to_pylist()
    if not records:
        raise ConfigError(f"--rollouts {path}: {file.name} has no responses")
    if missing := [name for name in ("prompt_tokens", "response_tokens") if name not in table.column_names]:
        raise ConfigError(f"--rollouts {path}: {file.name} has no column {missing[0]!r}")
    if any(record.get("images") for record in records):
        raise ConfigError(
            f"--rollouts {path}: the prompts of {file.name} have images, which the file only names; without "
            "--rollouts the images are made up"
        )
    return SavedRollouts(file, list(_groups(records)))


def _file(path: Path) -> Path:
    """The file that `path` names. Raises ConfigError."""
    if not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"--rollouts {path}: no such file or directory")
        return path
    run = path.resolve().parent if path.resolve().name == DIRECTORY else path
    if not (steps := saved_steps(run)):
        raise ConfigError(
            f"--rollouts {path}: no {DIRECTORY}/{file_name('train', 1)} or later step there: give a run's "
            "output directory or a file, and see logging.rollouts"
        )
    return run / DIRECTORY / file_name("train", steps[-1])


def _groups(records: list[dict[str, Any]]) -> Iterator[Group]:
    """The groups, whose rows follow each other. A response without a weight was not trained."""
    weighs = any(record.get("weight") is not None for record in records)
    for number, members in groupby(records, key=lambda record: record["group"]):
        group: Group | None = None
        for record in members:
            if group is None:
                ids = _ids(record, "prompt")
                group = Group(Prompt(f"saved-{number}", tuple(ids), record["prompt"] or ""), [])
            group.rollouts.append(_rollout(record, trained=record.get("weight") is not None or not weighs))
        assert group is not None
        yield group


def _rollout(record: Mapping[str, Any], trained: bool) -> Rollout:
    ids, logprobs, version = (
        _ids(record, "response"),
        record.get("rollout_logprobs"),
        record.get("version_first"),
    )
    return Rollout(
        token_ids=ids,
        logprobs=list(logprobs or ()),
        text=record["response"] or "",
        finish_reason=record.get("finish_reason") or "stop",
        weight_version=-1 if version is None else version,
        rewards={name: value for name, value in (record.get("rewards") or {}).items() if value is not None},
        reward=record["reward"] or 0.0,
        source=record.get("source") or "policy",
        trained=trained,
        turns=list(_turns(record.get("turns") or ())),
    )


def _ids(record: Mapping[str, Any], name: str) -> list[int]:
    """The token ids of the prompt or the response; zeros where a secret was hidden in a text."""
    ids = record.get(f"{name}_ids")
    return [0] * record[f"{name}_tokens"] if ids is None else ids


def _turns(turns: Any) -> Iterator[Turn]:
    begin = 0
    for turn in turns:
        outside = turn["given_ids"] or ()
        yield Turn(begin, turn["after"], None, tuple(outside), turn["agent"] or "", turn["reward"])
        begin += turn["tokens"]


def _tokens(group: Group) -> int:
    rows = TrainBatch.from_groups([group])
    return sum(rows.tokens)
