"""Replays the part of a step before the model: rollouts, prompts, rewards, rows, advantages and the mask.

Each component is computed from the recorded numbers of the component before it, so that a fault in one does
not appear in those after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from megatron_gvpo.algorithms.base import Stateful
from megatron_gvpo.checks.teacher import teacher_reads_text
from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.task import load_task
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.tokenizer import set_date
from megatron_gvpo.observe.rollouts.reader import read_rollouts
from megatron_gvpo.observe.step_records import StepRecord
from megatron_gvpo.replay.findings import (
    Finding,
    NotPossibleError,
    Tolerances,
    checked,
    first_difference,
    first_other,
    located,
    positions_of,
    scale_of,
    where,
)
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.runs.record import first_start
from megatron_gvpo.sampling.shaping import run_shapers
from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import TrainBatch
from megatron_gvpo.workers.tools import configured_schemas


class RowsReplay:
    """Checks the components of a step that need no model."""

    def __init__(self, config: Config, record: StepRecord, limits: Tolerances) -> None:
        self.config, self._record, self.limits = config, record, limits
        # Each response's group and its number in the group, by its position in the step.
        self.members: dict[int, tuple[int, int]] = {}

    def findings(self, estimator_state: dict[str, Any] | None) -> Iterator[Finding]:
        """Yield the finding of each component. `estimator_state`: before the step, or None if unknown."""
        checks = {
            "rollouts": self._rollouts,
            "template": self._template,
            "rewards": self._rewards,
            "shapers": self._shapers,
            "rows": self._rows,
            "advantages": lambda: self._advantages(estimator_state),
            "mask": self._mask,
        }
        return checked(self._record.step, checks.items())

    def _differs(
        self, component: str, text: str, position: int | None = None, token: int | None = None
    ) -> Finding:
        response = "" if position is None else where(position, self.members)
        response += "" if token is None else f", token {token}"
        text = f"{response}: {text}" if response else text
        return Finding(component, self._record.step, "differs", text, position, token)

    @cached_property
    def _saved(self) -> list[dict[str, Any]]:
        """The step's responses in the rollout files. Raises NotPossibleError if there are none."""
        try:
            table = read_rollouts(self.config.output_dir, "train", [self._record.step])
        except ValueError as error:
            raise NotPossibleError(str(error)) from None
        if not table.num_rows:
            raise NotPossibleError("this step has no rollout file (logging.rollouts)")
        if self.config.logging.rollouts.groups is not None:
            raise NotPossibleError("logging.rollouts.groups kept only some of the step's responses")
        return list(table.to_pylist())

    def name_members(self) -> None:
        """Set `members` from the rollout file, or from the recorded rows if there is no such file."""
        try:
            saved = [(row["group"], row["member"]) for row in self._saved]
            self.members = dict(enumerate(saved))
        except NotPossibleError:
            first = 0
            for rows in self._record.mini_batches:
                for position, group in zip(positions_of(rows), rows.group_n.tolist(), strict=True):
                    number = sum(other[0] == first + group for other in self.members.values())
                    self.members[position] = (first + group, number)
                first += int(rows.group_n.max()) + 1

    def _rollouts(self) -> Finding | None:
        """Check that the rows have every response of the rollout file, with the same tokens and log-probs."""
        rows_of = {
            position: (rows, i)
            for rows in self._record.mini_batches
            for i, position in enumerate(positions_of(rows))
        }
        for position, saved in enumerate(self._saved):
            if position not in rows_of:
                return self._differs(
                    "rollouts", "it is in the rollout file, and not in the step's rows", position
                )
            rows, i = rows_of[position]
            if saved["response_ids"] is None:
                raise NotPossibleError("a response has a secret, so the rollout file lacks its token ids")
            for name in ("prompt_ids", "response_ids"):
                recorded, others = list(getattr(rows, name)[i]), list(saved[name])
                if recorded != others:
                    token = first_other(recorded, others)
                    text = f"{name} of the rows are not those of the rollout file"
                    return self._differs("rollouts", text, position, token)
            other = self._commonest_group(rows, int(rows.group_n[i]))
            if other != saved["group"]:
                text = f"the rows count it to group {other}, the rollout file to group {saved['group']}"
                return self._differs("rollouts", text, position)
            if finding := self._engine_logprobs(rows, i, position, saved["rollout_logprobs"]):
                return finding
        return None

    def _commonest_group(self, rows: TrainBatch, number: int) -> int:
        """Return the rollout file's number of the group that most rows of group `number` belong to."""
        pairs = zip(positions_of(rows), rows.group_n.tolist(), strict=True)
        saved = [self._saved[position]["group"] for position, group in pairs if group == number]
        return max(saved, key=saved.count)

    def _engine_logprobs(
        self, rows: TrainBatch, i: int, position: int, saved: Sequence[float] | None
    ) -> Finding | None:
        if rows.engine_logp_r is None or saved is None:
            return None
        own_r = rows.engine_logp_r[rows.offsets[i] : rows.offsets[i + 1]]
        token = first_difference(own_r, torch.tensor(saved), 1e-6)
        if token is None:
            return None
        text = (
            f"log-prob by the engine: {saved[token]:.6g} in the rollout file, {own_r[token]:.6g} in the rows"
        )
        return self._differs("rollouts", text, position, token)

    @cached_property
    def _prompts(self) -> dict[str, Prompt]:
        """The data's prompts by id, rendered now. Raises NotPossibleError if the data cannot be read."""
        set_date(first_start(self.config.output_dir))
        try:
            schemas = configured_schemas(self.config.rollout.conversation)
            task = load_task(self.config, ModelCards(self.config).policy, schemas)
        except (ConfigError, DataError) as error:
            raise NotPossibleError(f"the data cannot be read: {error}") from None
        return {prompt.id: prompt for prompt in task.prompts}

    def with_images(self) -> StepRecord:
        """Return the record with the prompts' images from the data. Raises NotPossibleError without them."""
        if not self._record.has_images:
            return self._record
        named = {image.digest: image for prompt in self._prompts.values() for image in prompt.images}
        mini_batches = []
        for rows in self._record.mini_batches:
            if rows.images is None:
                raise NotPossibleError("an earlier version wrote the record, without the prompts' images")
            missing = [image for images in rows.images for image in images if image.digest not in named]
            if missing:
                file = missing[0].source or "of a data: URL"
                raise NotPossibleError(f"the data have no image with the content that {file} had in the run")
            images = [tuple(named[image.digest] for image in own) for own in rows.images]
            mini_batches.append(replace(rows, images=images))
        return replace(self._record, mini_batches=mini_batches)

    @cached_property
    def _images(self) -> dict[int, list[str]]:
        """The digests of the images in each response's prompt, by position, as far as they are recorded."""
        return {
            position: [image.digest for image in images]
            for rows in self._record.mini_batches
            for position, images in zip(positions_of(rows), rows.images or (), strict=False)
        }

    def _template(self) -> Finding | None:
        """Check that tokenizer, chat template and data give the recorded tokens and images of the prompts."""
        if self.config.algorithm.members:
            raise NotPossibleError("members of the groups may have changed prompts")
        for position, saved in enumerate(self._saved):
            prompt = self._prompts.get(saved["prompt_id"])
            if prompt is None:
                return self._differs("template", f"the data have no prompt {saved['prompt_id']}", position)
            recorded = list(saved["prompt_ids"] or prompt.token_ids)
            if recorded != list(prompt.token_ids):
                token = first_other(recorded, prompt.token_ids)
                text = "the prompt's tokens are not those that data, tokenizer and chat template give now"
                return self._differs("template", text, position, token)
            now = [image.digest for image in prompt.images]
            number = first_other(self._images.get(position, now), now)
            if number is not None:
                file = prompt.images[number].source.partition(",")[0]
                return self._differs("template", f"image {number}, {file}, had another content", position)
        return None

    @cached_property
    def _groups(self) -> list[Group]:
        """The step's groups before the shapers, with the components of their rewards."""
        weights = {component.name: component.weight for component in self.config.rewards.components}
        groups: list[Group] = []
        number = None
        for saved in self._saved:
            if saved["group"] != number:
                number = saved["group"]
                prompt = self._prompts.get(saved["prompt_id"])
                if prompt is None:
                    raise NotPossibleError(f"the data have no prompt {saved['prompt_id']}")
                groups.append(Group(prompt, []))
            rewards = {name: value for name, value in (saved["rewards"] or {}).items() if value is not None}
            errors = {name: text for name, text in (saved["reward_errors"] or {}).items() if text}
            groups[-1].rollouts.append(
                Rollout(
                    token_ids=list(saved["response_ids"] or ()),
                    logprobs=list(saved["rollout_logprobs"] or ()),
                    text=saved["response"],
                    finish_reason=saved["finish_reason"],
                    weight_version=-1 if saved["version_first"] is None else saved["version_first"],
                    rewards=rewards,
                    reward=sum(weights.get(name, 0.0) * value for name, value in rewards.items()),
                    reward_errors=errors,
                    source=saved["source"],
                )
            )
        return groups

    def _rewards(self) -> Finding | None:
        """Check that each reward function returns the recorded value again."""
        rewards = self.config.rewards
        if not rewards.components or not self.config.algorithm.samples_from_policy:
            raise NotPossibleError("the responses have no rewards by functions")
        if rewards.is_served or self.config.rollout.conversation is not None:
            raise NotPossibleError("servers or environments computed the rewards")
        again = [
            replace(group, rollouts=[replace(rollout) for rollout in group.rollouts])
            for group in self._groups
        ]
        try:
            with RewardPool(rewards) as pool:
                pool.score(again)
        except ConfigError as error:
            raise NotPossibleError(str(error)) from None
        position = 0
        for group, scored in zip(self._groups, again, strict=True):
            for rollout, own in zip(group.rollouts, scored.rollouts, strict=True):
                for name, value in rollout.rewards.items() if rollout.source == "policy" else ():
                    if abs(value - own.rewards.get(name, 0.0)) > 1e-6 * max(1.0, abs(value)):
                        now = own.reward_errors.get(name) or f"{own.rewards.get(name, 0.0):g}"
                        text = f"component {name}: {value:g} in the run, now {now}"
                        return self._differs("rewards", text, position)
                position += 1
        return None

    @cached_property
    def _shaped(self) -> list[Group]:
        """The groups after the shapers. Raises NotPossibleError if these cannot be applied again."""
        algorithm = self.config.algorithm.sized(self.config.rollout.max_tokens)
        if any(shaper.outside for shaper in algorithm.shapers):
            raise NotPossibleError("a shaper calls another model or a function of the user")
        if algorithm.members or self.config.rollout.conversation is not None:
            raise NotPossibleError("members or environments set rewards themselves")
        shaped, _ = run_shapers(algorithm.shapers, self._groups, self._record.step)
        if sum(len(g.rollouts) for g in shaped) != len(self._saved):
            raise NotPossibleError(
                "the shapers drop responses that the run trained: in the run they had further responses"
            )
        return shaped

    def _shapers(self) -> Finding | None:
        """Check that each reward equals the weighted sum of its components after the shapers."""
        if not self.config.rewards.components or not self.config.algorithm.samples_from_policy:
            raise NotPossibleError("the responses have no rewards by functions")
        rewards = [reward for group in self._shaped for reward in group.rewards]
        for position, (saved, reward) in enumerate(zip(self._saved, rewards, strict=True)):
            if abs(saved["reward"] - reward) > 1e-5 * max(1.0, abs(reward)):
                text = f"reward {saved['reward']:g} in the run; weights and shapers give {reward:g}"
                return self._differs("shapers", text, position)
        return None

    def _rows(self) -> Finding | None:
        """Check that the rows have the rewards and flags of the rollout file."""
        try:
            trained = [rollout.trained for group in self._shaped for rollout in group.rollouts]
        except NotPossibleError:
            trained = None
        # A teacher leaves out responses whose text it cannot score.
        may_leave_out = teacher_reads_text(self.config)
        for rows in self._record.mini_batches:
            for i, position in enumerate(positions_of(rows)):
                saved = self._saved[position]
                reward, truncated = float(rows.reward_n[i]), bool(rows.truncated_n[i])
                if abs(reward - saved["reward"]) > 1e-5 * max(1.0, abs(reward)):
                    text = f"reward {reward:g} in the rows, {saved['reward']:g} in the rollout file"
                    return self._differs("rows", text, position)
                if truncated != (saved["finish_reason"] == "length"):
                    text = f"truncated={truncated} in the rows, but it ended by {saved['finish_reason']}"
                    return self._differs("rows", text, position)
                is_trained = rows.trained_n is None or bool(rows.trained_n[i])
                if trained is None or (may_leave_out and not is_trained):
                    continue
                if is_trained != trained[position]:
                    text = f"trained={is_trained} in the rows, but {trained[position]} after the shapers"
                    return self._differs("rows", text, position)
        return None

    def _advantages(self, state: dict[str, Any] | None) -> Finding | None:
        """Check that the estimator computes the recorded advantages from the rows."""
        if self.config.algorithm.estimator is None:
            raise NotPossibleError("the method has no advantages: its loss takes rewards")
        estimator = self.config.algorithm.sized(self.config.rollout.max_tokens).estimator
        assert estimator is not None
        built = estimator.build()
        if isinstance(built, Stateful):
            if state is None:
                raise NotPossibleError(
                    "the estimator remembers earlier steps, and there is no checkpoint before this step"
                )
            built.load_state_dict(state)
        for rows in self._record.mini_batches:
            again, _ = built.fill(rows.with_columns(advantage_n=None, advantage_r=None))
            for name in ("advantage_n", "advantage_r", "return_r"):
                recorded, own = getattr(rows, name), getattr(again, name)
                if recorded is None or own is None:
                    if (recorded is None) != (own is None):
                        return self._differs("advantages", f"{name} is missing on one side")
                    continue
                index = first_difference(recorded, own, self.limits.advantage * scale_of(recorded, own))
                if index is not None:
                    text = f"{name}: {recorded[index]:.6g} in the run, {own[index]:.6g} replayed"
                    return self._differs("advantages", text, *located(rows, name, index))
        return None

    def _mask(self) -> Finding | None:
        """Check that every pass of updates trained exactly the rows that are marked as trained."""
        expected = [rows.trained() for rows in self._record.mini_batches]
        expected = [rows for rows in expected if len(rows)] * self.config.train.batch_epochs
        for update, rows in zip(self._record.updates, expected, strict=False):
            positions = set(positions_of(rows)) ^ set(update.place_n.tolist())
            if positions:
                position = min(positions)
                is_marked = position in positions_of(rows)
                text = "the rows mark it as trained, and no update has it"
                return self._differs("mask", text if is_marked else "an update trained it unmarked", position)
        if len(self._record.updates) != len(expected):
            text = f"{len(self._record.updates)} updates in the run; its rows make {len(expected)}"
            return self._differs("mask", text)
        return None


def state_after(config: Config, record: StepRecord, state: dict[str, Any]) -> dict[str, Any]:
    """Return the estimator's state after a recorded step, given the state before; {} if it has no state."""
    algorithm = config.algorithm.sized(config.rollout.max_tokens)
    built = None if algorithm.estimator is None else algorithm.estimator.build()
    if not isinstance(built, Stateful):
        return {}
    if state:
        built.load_state_dict(state)
    for rows in record.mini_batches:
        built.fill(rows.with_columns(advantage_n=None, advantage_r=None))
    return built.state_dict()
