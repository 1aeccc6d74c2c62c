"""A replay finds nothing in a sound run, of any layout, and names the fault that a run had.

Each fault is put into the trainer while it trains; the replay computes the step without it.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributed import launch
from helpers.tiny_run import StopAfter, configure, fit

from megatron_gvpo import cli
from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.core.user_functions import forget_functions
from megatron_gvpo.megatron.loss_pass import LossPass
from megatron_gvpo.megatron.optimizer import Optimizer
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.megatron.reference_weights import ReferenceWeights
from megatron_gvpo.observe.step_records import DIRECTORY, StepRecords, read, recorded_steps
from megatron_gvpo.replay.against import first_parting
from megatron_gvpo.replay.findings import COMPONENTS, Finding, Tolerances
from megatron_gvpo.replay.run import replay
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.runs.one_machine import load_run
from megatron_gvpo.runs.record import changed_files
from megatron_gvpo.settings.sections import StepRecordsConfig
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer
from megatron_gvpo.types import BatchTotals, TrainBatch

pytestmark = pytest.mark.usefixtures("leave_the_process_group")

GRPO = ("algorithm=grpo", "train.mini_batches=2")
TWO_STEPS = ("data.eval=null", "checkpoint.export_hf=false", "train.steps=2", "checkpoint.every=1")


def findings_of(out: Path, step: int = 2, **how: Any) -> tuple[Finding | None, list[Finding]]:
    findings: list[Finding] = []
    config = load_run(out, step=step)
    first = replay(config, step, how.pop("with_model", True), findings.append)
    return first, findings


@pytest.fixture(scope="module")
def sound(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GRPO run of two steps, of which the last can be replayed from step 1's checkpoint."""
    out = tmp_path_factory.mktemp("sound")
    fit(configure(task, out, *GRPO, *TWO_STEPS))
    return out


def test_a_sound_step_is_equal_in_every_component(sound: Path):
    first, findings = findings_of(sound)
    assert first is None
    assert {finding.component for finding in findings} == {*COMPONENTS}
    assert {finding.outcome for finding in findings} == {"equal"}, [
        f for f in findings if f.outcome != "equal"
    ]


def test_a_step_is_replayed_from_the_start_model_without_a_checkpoint(task: Path, tmp_path: Path):
    """The steps before it are taken first, from `model.path`."""
    fit(configure(task, tmp_path, *GRPO, *TWO_STEPS, "checkpoint.every=0", "train.batch_epochs=2"))
    assert findings_of(tmp_path)[0] is None


def test_a_resumed_run_keeps_the_records_up_to_its_checkpoint(task: Path, tmp_path: Path):
    fit(configure(task, tmp_path, *GRPO, *TWO_STEPS, "train.steps=4"), [StopAfter(2)])
    assert recorded_steps(tmp_path) == [1, 2]
    stray = tmp_path / DIRECTORY / "step_000003.safetensors"
    stray.write_bytes((tmp_path / DIRECTORY / "step_000002.safetensors").read_bytes())
    fit(configure(task, tmp_path, *GRPO, *TWO_STEPS, "train.steps=4"), resume=True)
    assert recorded_steps(tmp_path) == [1, 2, 3, 4]
    assert read(tmp_path, 3).step == 3
    assert findings_of(tmp_path, 3)[0] is None


def test_a_step_after_another_number_of_updates_has_the_learning_rate_of_the_run(task: Path, tmp_path: Path):
    how = (*GRPO, *TWO_STEPS, "train.steps=3", "checkpoint.keep=3")
    fit(configure(task, tmp_path, *how, "train.mini_batches=1"), [StopAfter(1)])
    fit(configure(task, tmp_path, *how), resume=True, allow_change=["train.mini_batches"])
    assert findings_of(tmp_path, 2)[0] is None


def test_records_above_the_limit_go_and_a_missing_one_is_named(sound: Path, tmp_path: Path):
    record = read(sound, 2)
    size = (sound / DIRECTORY / "step_000002.safetensors").stat().st_size
    records = StepRecords(tmp_path, StepRecordsConfig(max_gb=2.5 * size / 1e9), None)
    for step in (1, 2, 3, 4):
        records.write(replace(record, step=step), [])
    assert recorded_steps(tmp_path) == [3, 4]
    with pytest.raises(DataError, match="no record of step 1; it has: steps 3 to 4"):
        read(tmp_path, 1)


def test_a_record_is_read_as_it_was_written(sound: Path, tmp_path: Path):
    record = read(sound, 2)
    StepRecords(tmp_path, StepRecordsConfig(), None).write(record, [])
    again = read(tmp_path, 2)
    assert [rows.response_ids for rows in again.mini_batches] == [r.response_ids for r in record.mini_batches]
    assert [rows.prompt_ids for rows in again.mini_batches] == [r.prompt_ids for r in record.mini_batches]
    assert again.weights == record.weights
    for one, other in zip(record.updates, again.updates, strict=True):
        assert (one.gradients, one.metrics, one.lr) == (other.gradients, other.metrics, other.lr)
        assert one.weight_r is not None and other.weight_r is not None
        assert torch.equal(one.weight_r, other.weight_r)


def test_a_full_disk_is_an_oserror_which_all_ranks_raise(sound: Path, tmp_path: Path):
    record, limits = read(sound, 2), resource.getrlimit(resource.RLIMIT_FSIZE)
    records = StepRecords(tmp_path, StepRecordsConfig(), None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            records.write(record, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not recorded_steps(tmp_path)


def test_a_damaged_record_is_an_error_that_names_it(sound: Path, tmp_path: Path):
    (tmp_path / DIRECTORY).mkdir()
    content = (sound / DIRECTORY / "step_000002.safetensors").read_bytes()
    (tmp_path / DIRECTORY / "step_000002.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"step_000002\.safetensors: not the record of a step"):
        read(tmp_path, 2)


def test_gradient_sums_are_those_of_the_exported_gradients(task: Path, tmp_path: Path):
    """The sums that records keep, against gradients that another path of the code gathers and names."""
    from megatron_gvpo.megatron.gradient_export import export_gradients

    seen: dict[str, Any] = {}
    apply = Optimizer.apply

    class Watch(Callback):
        def on_start(self, trainer: Trainer) -> None:
            seen["policy"] = trainer.components.policy

    def watched(optimizer: Optimizer) -> Any:
        if "sums" not in seen:
            seen["sums"] = seen["policy"].tensor_sums.take("gradients")
            seen["gradients"] = export_gradients(seen["policy"].model)
        return apply(optimizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "apply", watched)
        fit(configure(task, tmp_path, *GRPO, *TWO_STEPS, "train.steps=1"), [Watch()])
    own, exported = seen["sums"], seen["gradients"]
    for megatron, names in {
        "embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
        "decoder.layers.2.mlp.linear_fc2.weight": ["model.layers.2.mlp.down_proj.weight"],
        "decoder.layers.1.self_attention.linear_qkv.weight": [
            f"model.layers.1.self_attn.{each}_proj.weight" for each in "qkv"
        ],
    }.items():
        parts = [exported[name].double() for name in names]
        assert own[megatron].total == pytest.approx(float(sum(part.sum() for part in parts)), rel=1e-5)
        squares = sum(float(part.square().sum()) for part in parts)
        assert own[megatron].norm == pytest.approx(squares**0.5, rel=1e-6)
    everything = sum(float(gradient.double().square().sum()) for gradient in exported.values())
    assert sum(values.norm**2 for values in own.values()) == pytest.approx(everything, rel=1e-6)


# Faults. Each is active in the second step of a run.


class At(Callback):
    """Calls `begin` when a step is over, so that the fault is there in the next one alone."""

    def __init__(self, step: int, begin: Callable[[Trainer], None]) -> None:
        self._step, self._begin = step, begin

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        if step == self._step - 1:
            self._begin(trainer)


@dataclass(frozen=True)
class Fault:
    """`put` brings it into the trainer before the second step; the replay must name it."""

    put: Callable[[Trainer, pytest.MonkeyPatch], None]
    component: str
    text: str = ""  # in the finding's text
    response: int | None = None
    token: int | None = None
    tensor: str | None = None
    settings: tuple[str, ...] = GRPO


def _once(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any], at: int = 0) -> None:
    """Let `change(result, *arguments)` change what the call number `at` of a method returns."""
    original, calls = getattr(owner, name), [0]

    def changed(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        calls[0] += 1
        return change(result, *arguments) if calls[0] - 1 == at else result

    is_static = isinstance(vars(owner).get(name), staticmethod) if isinstance(owner, type) else False
    patch.setattr(owner, name, staticmethod(changed) if is_static else changed)


def _rows(change: Callable[[TrainBatch], TrainBatch]) -> Callable[[Trainer, pytest.MonkeyPatch], None]:
    """Change the rows of the step's first mini-batch."""

    def put(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        _once(patch, TrainBatch, "from_groups", lambda rows, *_: change(rows))

    return put


def _swapped(column: torch.Tensor, one: int, other: int) -> torch.Tensor:
    swapped = column.clone()
    swapped[[one, other]] = column[[other, one]]
    return swapped


def _set(column: torch.Tensor, index: int, value: Any) -> torch.Tensor:
    changed = column.clone()
    changed[index] = value
    return changed


def _with_token(rows: TrainBatch, row: int) -> TrainBatch:
    ids = [list(own) for own in rows.response_ids]
    ids[row][0] = (ids[row][0] + 1) % 10
    return replace(rows, response_ids=ids)


def lost_advantage(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    def change(filled: Any, *_: Any) -> Any:
        rows, metrics = filled
        row = int(rows.advantage_n.abs().argmax())
        return rows.with_columns(advantage_n=_set(rows.advantage_n, row, 0.0)), metrics

    _once(patch, Estimator, "fill", change)


def scaled_micro_batch(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    _once(patch, LossPass, "__call__", lambda out, *_: (0.5 * out[0], out[1]), at=1)


def lost_response_in_the_gradient(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Response 10, of the second mini-batch, adds nothing to the gradient, and all else is right."""
    original = LossPass.__call__

    def call(self: LossPass, rows: TrainBatch, values: Any) -> Any:
        scalar, result = original(self, rows, values)
        if rows.place_n is not None and 10 in (numbers := rows.place_n.tolist()):
            begin, end = rows.offsets[numbers.index(10)], rows.offsets[numbers.index(10) + 1]
            assert result.weight_r is not None, "the second mini-batch has its weights from the forward"
            scalar = scalar - (result.weight_r[begin:end] * values[0][begin:end]).sum()
        return scalar, result

    patch.setattr(LossPass, "__call__", call)


def doubled_gradient(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    original = LossPass.__call__

    def call(self: LossPass, rows: TrainBatch, values: Any) -> Any:
        scalar, result = original(self, rows, values)
        return 2 * scalar, result

    patch.setattr(LossPass, "__call__", call)


def lost_tensor(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The gradient of one matrix is not there when the optimizer takes its step."""
    policy = trainer.components.policy
    original = policy._forward_and_backward

    def forward_and_backward(*arguments: Any) -> Any:
        results = original(*arguments)
        for chunk in policy.model.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("layers.2.mlp.linear_fc2.weight"):
                    parameter.main_grad.zero_()
        return results

    patch.setattr(policy, "_forward_and_backward", forward_and_backward)


def frozen_tensor(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """One matrix keeps its weights although it has a gradient."""
    optimizer = trainer.components.policy.optimizer
    original = optimizer.apply

    def apply() -> Any:
        [weight] = _weights(trainer, "layers.1.mlp.linear_fc1.weight")
        before = weight.detach().clone()
        update = original()
        with torch.no_grad():
            weight.copy_(before)
        return update

    patch.setattr(optimizer, "apply", apply)


def _weights(trainer: Trainer, name: str) -> list[torch.Tensor]:
    chunks = trainer.components.policy.model.chunks
    return [p for chunk in chunks for each, p in chunk.named_parameters() if each.endswith(name)]


def flipped_weight(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """A weight changes between two steps."""
    [weight] = _weights(trainer, "layers.3.self_attention.linear_proj.weight")
    with torch.no_grad():
        weight.view(-1)[7] += 1.0


def doubled_rate(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    scheduler = trainer.components.policy.optimizer.scheduler
    original = scheduler.get_lr
    patch.setattr(scheduler, "get_lr", lambda group: 2 * original(group))


def wrong_norm(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    optimizer = trainer.components.policy.optimizer.megatron
    original = optimizer.get_grad_norm
    patch.setattr(optimizer, "get_grad_norm", lambda: 1.5 * original())


def wrong_temperature(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trainer.components.policy, "_temperature", 0.8)


def wrong_clip(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    policy = trainer.components.policy
    patch.setattr(policy, "_loss", policy._loss.model_copy(update={"kl_coef": 0.5}))


def wrong_normaliser(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    _once(patch, BatchTotals, "of", lambda t, *_: replace(t, sequences=t.sequences + 1, tokens=t.tokens + 9))


def wrong_loss(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    _once(patch, LossPass, "metrics", lambda metrics, *_: metrics | {"loss": metrics["loss"] + 1.0})


def stale_reference(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The reference's log-probs are by the present weights: it was never put in place."""

    @contextmanager
    def swapped_in(self: ReferenceWeights) -> Iterator[None]:
        yield

    patch.setattr(ReferenceWeights, "swapped_in", swapped_in)


def late_reference(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The log-probs at step start of a mini-batch are off at one token."""
    _once(patch, Policy, "score", lambda logp_r, *_: _set(logp_r, 3, logp_r[3] - 0.5), at=1)


def wrong_logp(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """One log-prob of the trainer's own forward is off."""
    from megatron_gvpo.megatron.microbatch import Share

    original, calls = Share.gather, [0]

    def gather(self: Share, rows: TrainBatch, results: Any) -> torch.Tensor:
        column_r = original(self, rows, results)
        calls[0] += 1
        return _set(column_r, 4, column_r[4] + 0.1) if calls[0] == 1 else column_r

    patch.setattr(Share, "gather", gather)


def lost_row(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    _once(patch, TrainBatch, "trained", lambda rows, *_: rows.select([0, 1, 2, 4, 5, 6, 7]))


def lost_update(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    original = trainer._freeze_references
    patch.setattr(trainer, "_freeze_references", lambda mini_batches: original(mini_batches)[:1])


def doubled_component(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    original = RewardPool._record

    def record(self: RewardPool, rollout: Any, answers: Any) -> None:
        original(self, rollout, answers)
        rollout.reward *= 2

    patch.setattr(RewardPool, "_record", record)


GVPO = ("algorithm=gvpo",)  # its one update compares with no other policy
KL = (*GRPO, "algorithm.loss.reference=fixed", "algorithm.loss.kl_coef=0.1")

FAULTS = {
    "dropped response": Fault(_rows(lambda rows: rows.select([0, 1, 2, 4, 5, 6, 7])), "rollouts", "", 3),
    "swapped groups": Fault(
        _rows(lambda rows: replace(rows, group_n=_swapped(rows.group_n, 2, 5))), "rollouts", "group", 2
    ),
    "another token": Fault(_rows(lambda rows: _with_token(rows, 1)), "rollouts", "response_ids", 1, 0),
    "another engine log-prob": Fault(
        _rows(lambda r: replace(r, engine_logp_r=_set(r.engine_logp_r, 0, -9.0))),
        *("rollouts", "by the engine", 0, 0),
    ),
    "doubled reward": Fault(doubled_component, "shapers", "reward", 0),
    "swapped rewards": Fault(
        _rows(lambda rows: replace(rows, reward_n=rows.reward_n + torch.arange(8) * (torch.arange(8) == 6))),
        *("rows", "reward", 6),
    ),
    "wrong flag": Fault(
        _rows(lambda rows: replace(rows, truncated_n=_set(rows.truncated_n, 5, ~rows.truncated_n[5]))),
        *("rows", "truncated", 5),
    ),
    "wrong mark": Fault(
        _rows(lambda rows: replace(rows, trained_n=_set(rows.trained_n, 2, False))), "rows", "trained", 2
    ),
    "lost advantage": Fault(lost_advantage, "advantages", "advantage_n: 0 in the run"),
    "wrong mask": Fault(lost_row, "mask", "no update has it", 3),
    "lost update": Fault(lost_update, "mask", "1 updates in the run; its rows make 2"),
    "flipped weight": Fault(
        *(flipped_weight, "start weights"),
        tensor="decoder.layers.3.self_attention.linear_proj.weight",
        settings=(*GRPO, "checkpoint.every=0"),  # else the checkpoint has it, too
    ),
    "stale reference": Fault(stale_reference, "references", settings=KL),
    "reference log-prob": Fault(late_reference, "references", "1 of "),
    "wrong temperature": Fault(wrong_temperature, "log-probs", "16 of 16 responses", settings=GVPO),
    "wrong log-prob": Fault(wrong_logp, "log-probs", "1 of ", settings=GVPO),
    "wrong normaliser": Fault(wrong_normaliser, "loss weights"),
    "wrong option of the loss": Fault(wrong_clip, "loss weights"),
    "wrong loss": Fault(wrong_loss, "loss", "loss: "),
    "scaled micro-batch": Fault(
        scaled_micro_batch,
        *("gradients", "micro-batch 1 of data-parallel rank 0 counts 0.5 times"),
        settings=(*GRPO, "train.max_tokens_per_micro_batch=64"),
    ),
    "lost response in the gradient": Fault(
        lost_response_in_the_gradient,
        *("gradients", "response 10 counts 0 times"),
    ),
    "doubled gradient": Fault(doubled_gradient, "gradients", "all responses counts 2 times"),
    "lost tensor": Fault(lost_tensor, "gradients", tensor="decoder.layers.2.mlp.linear_fc2.weight"),
    "doubled rate": Fault(doubled_rate, "learning rate"),
    "wrong norm": Fault(wrong_norm, "gradient norm"),
    "frozen tensor": Fault(frozen_tensor, "weights", tensor="decoder.layers.1.mlp.linear_fc1.weight"),
}
# Recorded numbers show these without the model.
WITHOUT_MODEL = (
    *("dropped response", "swapped groups", "lost advantage", "wrong mask", "lost update", "flipped weight"),
    *("wrong normaliser", "wrong option of the loss", "wrong loss", "doubled rate", "wrong norm"),
)
# These stay in `make test`: one of each kind of part of the code.
QUICK = ("swapped groups", "lost advantage", "wrong normaliser", "scaled micro-batch", "frozen tensor")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.proof) for name in FAULTS]
)
def test_a_fault_is_named(task: Path, tmp_path: Path, name: str):
    fault = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        put = At(2, lambda trainer: fault.put(trainer, patch))
        fit(configure(task, tmp_path, *TWO_STEPS, *fault.settings), [put])
    first, findings = findings_of(tmp_path)
    assert first is not None, "nothing differs"
    assert (first.component, first.step) == (fault.component, 2), findings
    assert fault.text in first.text
    assert fault.response is None or first.response == fault.response, first
    assert fault.token is None or first.token == fault.token, first
    assert fault.tensor is None or first.tensor == fault.tensor, first
    if name in WITHOUT_MODEL:
        first, findings = findings_of(tmp_path, with_model=False)
        assert first is not None and first.component == fault.component, findings


@pytest.mark.parametrize(
    ("fault", "component", "text"),
    [
        ("stale", "log-probs", "all of these are of data-parallel rank 1"),
        pytest.param("halved", "gradients", "data-parallel rank 1", marks=pytest.mark.proof),
    ],
)
def test_a_faulty_rank_is_named(task: Path, tmp_path: Path, fault: str, component: str, text: str):
    settings = (*TWO_STEPS, "algorithm=gvpo", "checkpoint.every=0")
    launch(
        "helpers.workers.trainer_worker:fit_with_a_faulty_rank",
        *([2], str(task), str(tmp_path), fault, *settings),
    )
    first, findings = findings_of(tmp_path)
    assert first is not None and first.component == component, findings
    assert text in first.text
    assert fault == "stale" or "counts 0.5 times" in first.text


def copied(task: Path, target: Path) -> Path:
    """The task again, in another directory, to change its files."""
    shutil.copytree(task, target)
    for file in (target / "run.yaml",):
        file.write_text(file.read_text().replace(str(task), str(target)))
    return target


def test_files_that_have_changed_are_named_with_what_they_change(task: Path, tmp_path: Path):
    own, out = copied(task, tmp_path / "task"), tmp_path / "out"
    fit(configure(own, out, *GRPO, *TWO_STEPS))
    reward = own / "reward.py"
    reward.write_text(reward.read_text().replace("return rollout.token_ids[0] % 2", "return variety / 2 #"))
    reward.write_text(reward.read_text().replace(" if coarse else variety", ""))
    forget_functions()
    first, _ = findings_of(out, with_model=False)
    assert first is not None and (first.component, first.response) == ("rewards", 0)
    assert "component variety: " in first.text
    assert [change.key for change in changed_files(out, load_run(out))] == ["rewards.components.0.function"]

    data = own / "data" / "train.jsonl"
    data.write_text(data.read_text().replace("+", "-"))
    first, _ = findings_of(out, with_model=False)
    assert first is not None and first.component == "template"
    assert first.token is not None


def test_the_first_difference_may_be_in_an_earlier_step(task: Path, tmp_path: Path):
    """The learning rate of step 2 was wrong, and step 3 is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        put = [At(2, lambda t: doubled_rate(t, patch)), At(3, lambda t: patch.undo())]
        fit(configure(task, tmp_path, *GRPO, *TWO_STEPS, "train.steps=3", "checkpoint.every=0"), put)
    first, findings = findings_of(tmp_path, 3)
    assert first is not None and (first.component, first.step) == ("learning rate", 2), findings


def test_without_weights_the_rows_are_compared(sound: Path):
    first, findings = findings_of(sound, with_model=False)
    outcomes = {finding.component: finding.outcome for finding in findings}
    assert first is None
    needs_model = {"references", "log-probs", "gradients", "weights"}
    assert {name for name, outcome in outcomes.items() if outcome == "not checked"} == needs_model
    assert [finding.component for finding in findings] == [*COMPONENTS]


def test_two_runs_part_where_the_second_was_changed(task: Path, sound: Path, tmp_path: Path):
    limits = Tolerances.of("float32")
    fit(configure(task, tmp_path / "same", *GRPO, *TWO_STEPS))
    assert first_parting(sound, tmp_path / "same", limits) == ([1, 2], None)
    with pytest.MonkeyPatch.context() as patch:
        put = At(2, lambda trainer: doubled_rate(trainer, patch))
        fit(configure(task, tmp_path / "other", *GRPO, *TWO_STEPS), [put])
    finding = first_parting(sound, tmp_path / "other", limits).finding
    assert finding is not None and (finding.step, finding.component) == (2, "learning rate")
    fit(configure(task, tmp_path / "seed", *GRPO, *TWO_STEPS, "train.seed=7"))
    finding = first_parting(sound, tmp_path / "seed", limits).finding
    assert finding is not None and (finding.step, finding.component) == (1, "rollouts")


def test_the_command_says_what_it_found(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["replay", str(sound), "--step", "2", "--without-model"]) == 0
    assert "step 2: all that was compared is equal to the run's" in capsys.readouterr().out
    shutil.copytree(sound, tmp_path / "copy")
    record = read(sound, 2)
    rows = record.mini_batches[0]
    assert rows.advantage_n is not None
    record.mini_batches[0] = rows.with_columns(advantage_n=rows.advantage_n + 1)
    StepRecords(tmp_path / "copy", StepRecordsConfig(), 2).write(record, [])
    assert cli.main(["replay", str(tmp_path / "copy"), "--without-model"]) == 1
    assert "first difference: step 2, advantages: response 0" in capsys.readouterr().out
    assert cli.main(["replay", str(sound), "--against", str(tmp_path / "copy")]) == 1
    assert "the runs part in step 2, advantages: response 0" in capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "want the output_dir of a run" in capsys.readouterr().err
    for options in (["--without-model"], ["--against", str(tmp_path / "copy")]):
        assert cli.main(["replay", str(sound), *options, "parallel.tp=2"]) == 2
        assert f"parallel.tp=2: {options[0]} computes no model" in capsys.readouterr().err
    assert cli.main(["replay", str(sound), "parallel.tp=2"]) == 2
    assert "parallel" in capsys.readouterr().err
    for command in ("replay", "mismatch"):
        assert cli.main([command, str(sound), "model.path=/none"]) == 2
        assert "the run's model is not there; give its place" in capsys.readouterr().err
        assert cli.main([command, str(sound), "rollout.n=3"]) == 2
        assert "rollout.n: the run has had its own; only paths may be given" in capsys.readouterr().err


def test_a_step_without_a_record_is_refused_before_megatron_is_loaded(
    sound: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megatron_gvpo.cli.replay.run_with_model", pytest.fail)
    assert cli.main(["replay", str(sound), "--step", "9"]) == 2
    assert "no record of step 9; it has: steps 1 to 2" in capsys.readouterr().err
