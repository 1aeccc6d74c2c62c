"""Names the causes of the gap between the engine's and the trainer's log-probs: `megatron-gvpo mismatch`."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megatron_gvpo.algorithms.base import STEP_START
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.groups import Routing
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.observe.mismatch import mismatch
from megatron_gvpo.observe.rollouts.reader import read_rollouts
from megatron_gvpo.observe.step_records import read
from megatron_gvpo.replay.certificate import Cause, Certificate, Token
from megatron_gvpo.replay.findings import Tolerances
from megatron_gvpo.replay.judge import (
    PRECISIONS,
    Case,
    ExactJudge,
    Sampling,
    Suspicion,
    engine_suspicions,
    exchanged_experts,
    response_logits,
    template_suspicions,
    trainer_suspicions,
)
from megatron_gvpo.replay.kept_tokens import listed, origin
from megatron_gvpo.replay.model import ModelReplay, Start
from megatron_gvpo.replay.routing import RouterModules
from megatron_gvpo.replay.run import earlier_findings, rows_of, steps_like
from megatron_gvpo.replay.templates import OtherTemplates
from megatron_gvpo.runs.one_machine import in_layout
from megatron_gvpo.settings.config import Config
from megatron_gvpo.supports import Support

_EARLIER = 3  # the number of earlier versions of the weights that are suspected
_REPRODUCED = 0.25  # a suspicion is a cause if it leaves at most this part of the gap's root mean square
_USUAL = 4.0  # rounding may be this many times as large as that of transformers in the same precision
_WORST = 5  # the number of tokens in the certificate's list of the worst
_FEW, _MANY = 8, 64  # the number of responses that measure rounding: in other precisions, in the run's own


@dataclass(frozen=True)
class _Response:
    """A response of the step with the log-probs of engine and trainer, fp64 [tokens]."""

    position: int
    case: Case
    version: int  # the version of the weights that sampled it
    engine: Tensor
    trainer: Tensor
    is_of_policy: bool  # true if the engine sampled it in this run, false for other members of the group
    is_of_step_start: bool  # the trainer's log-probs are by the weights before the step's first update


@dataclass(frozen=True)
class _Gap:
    """The differences between one side (engine or trainer) and the judge on a response, and their cause."""

    response: _Response
    side: str
    cause: str
    detail: str
    gap: Tensor
    bound: float | None = None  # the largest gap that rounding explains, nats


def certify(config: Config, step: int) -> Certificate:
    """Find the causes of the mismatch of a step. Raises DataError without rollouts, weights or records."""
    scored = _responses(config, step)
    responses = [response for response in scored if response.is_of_step_start]
    wanted = {step - 1 - k for k in range(_EARLIER + 1)} | {r.version for r in responses}
    wanted |= {r.version - k for r in responses for k in range(_EARLIER + 1)}
    with tempfile.TemporaryDirectory(prefix="mismatch-") as folder:
        judges = _judges(config, step, wanted, Path(folder))
        # frees the policy that exported the weights, whose modules and hooks refer to each other
        gc.collect()
        if step - 1 not in judges:
            raise DataError(f"the weights of step {step - 1} cannot be computed again: see `replay`")
        sampling, templates = Sampling.of(config), OtherTemplates.of(config)
        bounds = _bounds(responses, judges[step - 1], config.model.dtype)
        _let_earlier_read(judges, responses, step - 1, bounds)
        gaps = [gap for r in responses for gap in _gaps(r, judges, step - 1, sampling, templates, bounds)]
        gaps = list(_named_precision(gaps, bounds))
        gaps += _wrong_sets(responses, gaps, judges, sampling, bounds.limit)
        gaps += _lost_experts(responses, config)
    return replace(_certificate(config, step, responses, gaps), left_out=len(scored) - len(responses))


def _responses(config: Config, step: int) -> list[_Response]:
    """Return the step's responses that have log-probs of both engine and trainer."""
    try:
        saved = read_rollouts(config.output_dir, "train", [step]).to_pylist()
    except ValueError as error:
        raise DataError(str(error)) from None
    records, temperature = _records(config, step), config.rollout.temperature
    at_start = _scored_at_start(config, step)
    responses = []
    for position, row in enumerate(saved):
        columns = ("prompt_ids", "response_ids", "rollout_logprobs", "trainer_logprobs", "version_first")
        if any(row[name] is None for name in columns) or row["turns"] or row["images"]:
            continue
        engine, trainer = (torch.tensor(row[name], dtype=torch.float64) for name in columns[2:4])
        if (
            len(engine) == len(trainer) == len(row["response_ids"])
            and row["version_first"] == row["version_last"]
        ):
            of_record = records.get(position, (None, None))
            case = Case(row["prompt_ids"], row["response_ids"], temperature, *of_record)
            marks = row["source"] == "policy", at_start is None or position in at_start
            responses.append(_Response(position, case, row["version_first"], engine, trainer, *marks))
    if not any(response.is_of_step_start for response in responses):
        raise DataError(
            f"{config.output_dir}: no response of step {step} has log-probs of engine and trainer in the "
            "rollout files (logging.rollouts); those of conversations and images are left out"
        )
    return responses


def _records(config: Config, step: int) -> dict[int, tuple[Support | None, Routing | None]]:
    """Return the kept tokens and experts of each response, by its position; {} if the run records neither."""
    if not (config.rollout.wants_support or config.rollout.router_replay):
        return {}
    _check_all_are_saved(config, "their kept tokens and experts")
    records: dict[int, tuple[Support | None, Routing | None]] = {}
    for rows in read(config.output_dir, step).mini_batches:
        assert rows.place_n is not None, "the trainer numbers the rows of a step"
        supports, routings = rows.support or [None] * len(rows), rows.routing or [None] * len(rows)
        records |= dict(zip(rows.place_n.tolist(), zip(supports, routings, strict=True), strict=True))
    return records


def _scored_at_start(config: Config, step: int) -> set[int] | None:
    """Return the positions of the responses that the trainer scored before the step's updates; None: all.

    A method that scores nothing before its updates has the log-probs of its later mini-batches from their
    own updates, after the earlier ones of the step.
    """
    algorithm = config.algorithm
    compares = STEP_START in algorithm.loss.reference_policies.values()
    if (compares and algorithm.reference_logprobs == "trainer") or config.train.mini_batches == 1:
        return None
    _check_all_are_saved(config, "their mini-batches")
    updates = read(config.output_dir, step).updates
    return {position for update in updates[:1] for position in update.place_n.tolist()}


def _check_all_are_saved(config: Config, what: str) -> None:
    """Raise DataError where positions in the rollout file are not those in the step's record."""
    if config.logging.rollouts.groups is not None:
        raise DataError(
            "logging.rollouts.groups kept only some of the step's responses, so that those of the step's "
            f"record, which has {what}, cannot be told apart"
        )


def _judges(config: Config, step: int, wanted: set[int], folder: Path) -> dict[int, ExactJudge]:
    """Return the judges of the wanted versions of the weights, as far as they can be computed again."""
    local, recorded = in_layout(config), steps_like(config.output_dir, step)
    early = Start.before(config.output_dir, max(1, step - _EARLIER), recorded)
    if early is None or any(s not in recorded for s in range(early.step + 1, step)):
        early = Start.before(config.output_dir, step, recorded)
    if early is None:
        raise DataError(
            f"{config.output_dir}: no checkpoint before step {step} from which every step is recorded "
            "(checkpoint.every, logging.steps)"
        )
    tolerances = Tolerances.of(config.model.dtype)
    model = ModelReplay(local, config, early, tolerances)
    judges: dict[int, ExactJudge] = {}
    for version in range(early.step, step):
        if version > early.step:
            findings = earlier_findings(model, rows_of(local, version, tolerances), version)
            if any(finding.outcome == "differs" for finding in findings):
                break  # this step cannot be repeated, so later weights cannot be computed again
        if version in wanted:
            directory = folder / str(version)
            model.policy.model.save_hf(directory)
            judges[version] = ExactJudge(directory, version)
    return judges


def _gaps(
    response: _Response,
    judges: dict[int, ExactJudge],
    present: int,
    sampling: Sampling,
    templates: OtherTemplates,
    bounds: _Rounding,
) -> Iterator[_Gap]:
    """Yield a response's gaps: engine to judge, trainer to judge, and old to new weights."""
    case = response.case
    now = judges[present].logp(case)
    sampler = judges.get(response.version)
    if sampler is None:
        yield _Gap(response, "engine", "unknown weights", f"step {response.version}", response.engine - now)
    else:
        then = sampler.logp(case)
        earlier = _before(judges, response.version)
        side = _Side("engine", response.engine, sampler, then)
        of_engine = chain(
            engine_suspicions([sampler, *earlier], case, sampling),
            template_suspicions(sampler, case, templates),
        )
        yield _explained(response, side, of_engine, bounds)
        if sampler is not judges[present]:
            detail = f"sampled by step {response.version}, as rollout.async_steps allows"
            yield _Gap(response, "both", "the policy's own change", detail, now - then)
    side = _Side("trainer", response.trainer, judges[present], now)
    suspicions = trainer_suspicions([judges[present], *_before(judges, present)], case)
    yield _explained(response, side, suspicions, bounds)


def _let_earlier_read(
    judges: dict[int, ExactJudge], responses: Sequence[_Response], present: int, bounds: _Rounding
) -> None:
    """Let the judges of earlier weights read the responses that are looked into, one model at a time."""
    for version, other in judges.items():
        if version == present:
            continue
        for response in responses:
            case, sampler = response.case, judges.get(response.version)
            if version < present and bounds.is_exceeded(response.trainer - judges[present].logp(case)):
                other.logp(case)
            if sampler is None or version >= response.version:
                continue
            if bounds.is_exceeded(response.engine - sampler.logp(case)):
                other.logp(case)
                sampler.logp_after(other, case)
        other.release()


def _before(judges: dict[int, ExactJudge], version: int) -> list[ExactJudge]:
    """Return the judges of earlier weights, the latest first."""
    return [judges[v] for v in sorted(judges, reverse=True) if v < version]


def _wrong_sets(
    responses: Sequence[_Response],
    gaps: Sequence[_Gap],
    judges: dict[int, ExactJudge],
    sampling: Sampling,
    slack: float,
) -> Iterator[_Gap]:
    """Yield responses whose recorded kept tokens contradict the run's limits although the log-probs agree.

    If the engine's log-probs differ, their cause is already known and also explains the kept tokens.
    """
    explained = [gap.response for gap in gaps if gap.side == "engine" and gap.cause != "precision"]
    for response in responses if sampling.limits else ():
        case, sampler = response.case, judges.get(response.version)
        if sampler is None or not response.is_of_policy or any(response is other for other in explained):
            continue
        candidates = [sampler, *_before(judges, response.version)]
        logp = ((j.version, torch.log_softmax(j.logits(case) / case.temperature, -1)) for j in candidates)
        recorded = case.support or Support.whole_vocabulary(len(case.ids))
        whose = origin(logp, recorded, sampling.limits, sampling.in_turn, slack)
        if whose is not None:
            detail = f"the recorded kept tokens are not those of {listed(sampling.limits)}, but {whose}"
            yield _Gap(response, "engine", "truncated support", detail, torch.zeros_like(response.engine))


def _lost_experts(responses: Sequence[_Response], config: Config) -> Iterator[_Gap]:
    """Yield the responses that have no recorded experts although the run replays experts."""
    for response in responses if config.rollout.router_replay else ():
        if response.is_of_policy and response.case.routing is None:
            detail = "rollout.router_replay=true, and no experts are recorded"
            yield _Gap(response, "engine", "routing", detail, torch.zeros_like(response.engine))


@dataclass(frozen=True)
class _Side:
    """The log-probs of engine or trainer, and the judge's with the weights that this side should have."""

    name: str
    logp: Tensor
    judge: ExactJudge
    right: Tensor


def _explained(response: _Response, side: _Side, suspicions: Iterator[Suspicion], bounds: _Rounding) -> _Gap:
    """Return a side's gap and its cause: rounding, or the suspicion that fits best; "" if none fits."""
    gap = side.logp - side.right
    largest = float(gap.abs().max())
    if largest <= bounds.limit:
        return _Gap(response, side.name, "precision", bounds.own, gap, bounds.limit)
    if bounds.routing is not None and largest <= bounds.routing:
        detail = f"scores of experts that are equal to rounding in {bounds.own}"
        return _Gap(response, side.name, "routing", detail, gap, bounds.routing)
    best, least = None, _REPRODUCED * float(gap.square().mean().sqrt())
    for suspicion in suspicions:
        remainder = float((side.logp - suspicion.logp).square().mean().sqrt())
        if remainder < least:
            best, least = suspicion, remainder
    if best is None and side.judge.routers.modules and response.case.routing is None:
        best = exchanged_experts(side.judge, response.case, side.logp, bounds.limit)
    if best is None:
        return _Gap(response, side.name, "", "", gap)
    return _Gap(response, side.name, best.cause, best.detail, gap)


@dataclass(frozen=True)
class _Rounding:
    """The rounding errors of log-probs of a step's responses, in nats."""

    own: str  # the run's precision
    mean_square: dict[str, float]  # by precision
    largest: dict[str, float]  # by precision
    largest_of_few: float  # the largest error in the run's precision, in a few responses
    routing: float | None  # the largest gap in the run's precision if rounding may also change experts

    @property
    def limit(self) -> float:
        """The largest gap that counts as rounding in the run's precision without further checks."""
        return _USUAL * self.largest_of_few

    def is_exceeded(self, gap: Tensor) -> bool:
        """True for a response's gap that neither rounding of numbers nor of experts' scores explains."""
        return float(gap.abs().max()) > max(self.limit, self.routing or 0.0)


def _bounds(responses: Sequence[_Response], judge: ExactJudge, own: str) -> _Rounding:
    """Measure the rounding errors of transformers in each precision.

    In the run's own precision, all tokens keep the experts of the judge; `routing` is measured without this
    condition. The largest errors are rare: in bfloat16, most of SmolLM2's tokens are off by less than 0.01
    nats, and a few by 0.4. So the run's own precision is measured on many responses, the others on a few.
    """

    def errors(precision: str, keeps_experts: bool, count: int) -> list[Tensor]:
        # the model is freed after this call, because it is as large as the run's
        model, each = judge.rounded(precision), []
        routers = RouterModules.of(model)
        for case in [response.case for response in responses[:count]]:
            exact = judge.logp(case)
            with routers.choosing(judge.own_choice(case) if keeps_experts else case.rule):
                each.append(case.logp(response_logits(model, case)) - exact)
        return each

    of_responses = {name: errors(name, name == own, _MANY if name == own else _FEW) for name in PRECISIONS}
    error = {name: torch.cat(each) for name, each in of_responses.items()}
    largest_of_few = float(torch.cat(of_responses[own][:_FEW]).abs().max())
    squares = {name: float(e.square().mean()) for name, e in error.items()}
    largest = {name: float(e.abs().max()) for name, e in error.items()}
    routing = None
    if judge.routers.modules:
        # Rounding changes the experts of few tokens, but their log-probs change much, so many responses are
        # needed.
        routing = _USUAL * float(torch.cat(errors(own, False, _MANY)).abs().max())
    return _Rounding(own, squares, largest, largest_of_few, routing)


def _named_precision(gaps: Sequence[_Gap], bounds: _Rounding) -> Iterator[_Gap]:
    """Yield the gaps, some with a precision as their cause.

    The cause of a gap that has none becomes the precision whose rounding explains it, if there is one.
    """
    for side in ("engine", "trainer", "both"):
        of_side = [gap for gap in gaps if gap.side == side]
        opened = [gap for gap in of_side if not gap.cause]
        name = _precision(opened, bounds)
        if opened and _is_own_rounding(opened + [gap for gap in of_side if gap.cause == "precision"], bounds):
            name = bounds.own
        for gap in of_side:
            if gap.cause == "precision" and name == bounds.own:
                yield replace(gap, bound=_USUAL * bounds.largest[name])
            elif gap.cause:
                yield gap
            elif name is None:
                yield replace(gap, cause="unexplained", detail="no suspicion reproduces it")
            else:
                yield replace(gap, cause="precision", detail=name, bound=_USUAL * bounds.largest[name])


def _is_own_rounding(gaps: Sequence[_Gap], bounds: _Rounding) -> bool:
    """True if rounding in the run's precision explains the root mean square and the maximum of these gaps."""
    every = torch.cat([gap.gap for gap in gaps])
    is_usual = float(every.square().mean()) <= _USUAL**2 * bounds.mean_square[bounds.own]
    return is_usual and float(every.abs().max()) <= _USUAL * bounds.largest[bounds.own]


def _precision(opened: Sequence[_Gap], bounds: _Rounding) -> str | None:
    """Return the highest precision whose rounding explains the gaps, or None."""
    if not opened:
        return None
    square = float(torch.cat([gap.gap for gap in opened]).square().mean())
    for precision in PRECISIONS:
        if square <= _USUAL**2 * bounds.mean_square[precision]:
            return precision
    return None


def _certificate(
    config: Config, step: int, responses: Sequence[_Response], gaps: Sequence[_Gap]
) -> Certificate:
    difference_r = torch.cat([response.trainer - response.engine for response in responses])
    total = sum(float(gap.gap.square().sum()) for gap in gaps) or 1.0
    named: dict[tuple[str, str, str], list[_Gap]] = {}
    for gap in gaps:
        named.setdefault((gap.side, gap.cause, gap.detail), []).append(gap)
    causes = []
    for (side, cause, detail), own in named.items():
        gap_r = torch.cat([each.gap for each in own])
        bound = own[0].bound
        share, sizes = float(gap_r.square().sum()) / total, gap_r.abs()
        mean, largest = float(sizes.mean()), float(sizes.max())
        causes.append(Cause(side, cause, detail, len(gap_r), len(own), share, mean, largest, bound))
    causes.sort(key=lambda cause: -cause.share)
    numbers = mismatch(difference_r, torch.tensor([len(response.trainer) for response in responses]))
    return Certificate(
        step,
        config.model.dtype,
        len(difference_r),
        numbers["abs_mean"],
        numbers["abs_max"],
        numbers["kl"],
        causes,
        _worst_tokens(config, responses, gaps),
    )


def _worst_tokens(config: Config, responses: Sequence[_Response], gaps: Sequence[_Gap]) -> list[Token]:
    """Return the tokens with the largest gaps between engine and trainer."""
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    positions = [(r, t) for r in responses for t in range(len(r.case.ids))]
    positions.sort(key=lambda at: -abs(float(at[0].trainer[at[1]] - at[0].engine[at[1]])))
    tokens = []
    for response, t in positions[:_WORST]:
        own = [gap for gap in gaps if gap.response is response]
        judge = next(response.trainer - gap.gap for gap in own if gap.side == "trainer")[t]
        largest = max(own, key=lambda gap: abs(float(gap.gap[t])))
        tokens.append(
            Token(
                response.position,
                t,
                tokenizer.decode([response.case.ids[t]]),
                float(response.engine[t]),
                float(response.trainer[t]),
                float(judge),
                f"{largest.side}: {largest.cause}",
            )
        )
    return tokens
