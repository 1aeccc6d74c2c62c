"""Names the causes of the gap between the engine's and the trainer's log-probs: `megatron-gvpo mismatch`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.groups import Routing
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.observe.mismatch import mismatch
from megatron_gvpo.observe.rollouts.reader import read_rollouts
from megatron_gvpo.observe.step_records import read, recorded_steps
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
    template_suspicions,
    trainer_suspicions,
)
from megatron_gvpo.replay.kept_tokens import listed, origin, recorded_tokens
from megatron_gvpo.replay.model import ModelReplay, Start
from megatron_gvpo.replay.run import earlier_findings, rows_of
from megatron_gvpo.replay.templates import OtherTemplates
from megatron_gvpo.runs.one_machine import in_layout
from megatron_gvpo.settings.config import Config
from megatron_gvpo.supports import Support

_EARLIER = 3  # earlier versions of the weights that are suspected
_REPRODUCED = 0.25  # a suspicion must leave at most this part of the gap's root mean square
_USUAL = 4.0  # rounding may be this many times what transformers has in the same precision
_WORST = 5  # tokens that are shown
_FEW, _MANY = 8, 64  # responses in which rounding is measured: that of numbers, that of the choice of experts


@dataclass(frozen=True)
class _Response:
    """A response of the step with both sides' log-probs, fp64 [tokens]."""

    position: int
    case: Case
    version: int  # of the weights that sampled it
    engine: Tensor
    trainer: Tensor
    is_of_policy: bool  # sampled in the run, and not added to the group


@dataclass(frozen=True)
class _Gap:
    """One side's gap from the judge on one response, and its cause."""

    response: _Response
    side: str
    cause: str
    detail: str
    gap: Tensor
    bound: float | None = None  # the largest gap that rounding explains, nats


def certify(config: Config, step: int) -> Certificate:
    """Find the causes of the mismatch of a step. Raises DataError without rollouts, weights or records."""
    responses = _responses(config, step)
    wanted = {step - 1 - k for k in range(_EARLIER + 1)} | {r.version for r in responses}
    wanted |= {r.version - k for r in responses for k in range(_EARLIER + 1)}
    with tempfile.TemporaryDirectory(prefix="mismatch-") as folder:
        judges = _judges(config, step, wanted, Path(folder))
        if step - 1 not in judges:
            raise DataError(f"the weights of step {step - 1} cannot be computed again: see `replay`")
        sampling, templates = Sampling.of(config), OtherTemplates.of(config)
        bounds = _bounds(responses, judges[step - 1], config.model.dtype)
        gaps = [gap for r in responses for gap in _gaps(r, judges, step - 1, sampling, templates, bounds)]
        gaps = list(_named_precision(gaps, bounds))
        gaps += _wrong_sets(responses, gaps, judges, sampling, bounds.limit)
        gaps += _lost_experts(responses, config)
    return _certificate(config, step, responses, gaps)


def _responses(config: Config, step: int) -> list[_Response]:
    """The step's responses that the engine sampled and the trainer scored."""
    try:
        saved = read_rollouts(config.output_dir, "train", [step]).to_pylist()
    except ValueError as error:
        raise DataError(str(error)) from None
    records, temperature = _records(config, step), config.rollout.temperature
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
            is_of_policy = row["source"] == "policy"
            responses.append(_Response(position, case, row["version_first"], engine, trainer, is_of_policy))
    if not responses:
        raise DataError(
            f"{config.output_dir}: no response of step {step} has log-probs of engine and trainer in the "
            "rollout files (logging.rollouts); those of conversations and images are left out"
        )
    return responses


def _records(config: Config, step: int) -> dict[int, tuple[Support | None, Routing | None]]:
    """The kept tokens and experts of each response, by its position; empty for a run without either."""
    if not (config.rollout.wants_support or config.rollout.router_replay):
        return {}
    if config.logging.rollouts.groups is not None:
        raise DataError(
            "logging.rollouts.groups kept only some of the step's responses, so that those of the step's "
            "record, which has their kept tokens and experts, cannot be told apart"
        )
    records: dict[int, tuple[Support | None, Routing | None]] = {}
    for rows in read(config.output_dir, step).mini_batches:
        assert rows.place_n is not None, "the trainer numbers the rows of a step"
        supports, routings = rows.support or [None] * len(rows), rows.routing or [None] * len(rows)
        records |= dict(zip(rows.place_n.tolist(), zip(supports, routings, strict=True), strict=True))
    return records


def _judges(config: Config, step: int, wanted: set[int], folder: Path) -> dict[int, ExactJudge]:
    """A judge of each wanted version that can be computed again, by version."""
    local, recorded = in_layout(config), recorded_steps(config.output_dir)
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
                break  # the weights after it cannot be computed again
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
    """The gaps of engine and trainer from the judge, and the policy's own change between their weights."""
    case = response.case
    now = case.logp(judges[present].logits(case))
    sampler = judges.get(response.version)
    if sampler is None:
        yield _Gap(response, "engine", "unknown weights", f"step {response.version}", response.engine - now)
    else:
        then = case.logp(sampler.logits(case))
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


def _before(judges: dict[int, ExactJudge], version: int) -> list[ExactJudge]:
    """The judges of earlier weights, the latest first."""
    return [judges[v] for v in sorted(judges, reverse=True) if v < version]


def _wrong_sets(
    responses: Sequence[_Response],
    gaps: Sequence[_Gap],
    judges: dict[int, ExactJudge],
    sampling: Sampling,
    slack: float,
) -> Iterator[_Gap]:
    """Responses whose recorded kept tokens are not those of the run's limits, although log-probs agree.

    An engine whose log-probs differ has been named already: its kept tokens follow from that cause.
    """
    explained = [gap.response for gap in gaps if gap.side == "engine" and gap.cause != "precision"]
    for response in responses if sampling.limits else ():
        case, sampler = response.case, judges.get(response.version)
        if sampler is None or not response.is_of_policy or any(response is other for other in explained):
            continue
        logits = {j.version: j.logits(case) for j in [sampler, *_before(judges, response.version)]}
        logp = [(v, torch.log_softmax(x / case.temperature, -1)) for v, x in logits.items()]
        recorded = case.support or Support.whole_vocabulary(len(case.ids))
        recorded_tv = recorded_tokens(recorded, logp[0][1].shape[1])
        whose = origin(logp, recorded_tv, sampling.limits, sampling.in_turn, slack)
        if whose is not None:
            detail = f"the recorded kept tokens are not those of {listed(sampling.limits)}, but {whose}"
            yield _Gap(response, "engine", "truncated support", detail, torch.zeros_like(response.engine))


def _lost_experts(responses: Sequence[_Response], config: Config) -> Iterator[_Gap]:
    """Responses without recorded experts in a run that replays them."""
    for response in responses if config.rollout.router_replay else ():
        if response.is_of_policy and response.case.routing is None:
            detail = "rollout.router_replay=true, and no experts are recorded"
            yield _Gap(response, "engine", "routing", detail, torch.zeros_like(response.engine))


@dataclass(frozen=True)
class _Side:
    """A side's log-probs, and those of the judge with the weights that it should have."""

    name: str
    logp: Tensor
    judge: ExactJudge
    right: Tensor


def _explained(response: _Response, side: _Side, suspicions: Iterator[Suspicion], bounds: _Rounding) -> _Gap:
    """A side's gap, as rounding or with the suspicion that reproduces it best; without either it is open."""
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
    largest: dict[str, float]
    routing: float | None  # the largest gap of the run's precision where rounding also changes experts

    @property
    def limit(self) -> float:
        """The largest gap that rounding in the run's precision explains."""
        return _USUAL * self.largest[self.own]


def _bounds(responses: Sequence[_Response], judge: ExactJudge, own: str) -> _Rounding:
    """The rounding of transformers in each precision, on a few responses.

    In the run's own precision it is that of tokens that keep their experts; `routing` has it without that.
    """

    def errors(precision: str, keeps_experts: bool, most: int) -> Tensor:
        each = []
        for case in [response.case for response in responses[:most]]:
            rule = judge.own_choice(case) if keeps_experts else case.rule
            rounded = case.logp(judge.rounded(precision, rule, case))
            each.append(rounded - case.logp(judge.logits(case)))
        return torch.cat(each)

    error = {precision: errors(precision, precision == own, _FEW) for precision in PRECISIONS}
    squares = {precision: float(e.square().mean()) for precision, e in error.items()}
    largest = {precision: float(e.abs().max()) for precision, e in error.items()}
    routing = None
    if judge.routers.modules:
        # Few tokens have other experts by rounding, and these differ much: a few responses may have none.
        routing = _USUAL * float(errors(own, False, _MANY).abs().max())
    return _Rounding(own, squares, largest, routing)


def _named_precision(gaps: Sequence[_Gap], bounds: _Rounding) -> Iterator[_Gap]:
    """The gaps, the open ones of each side named by the precision that fits."""
    for side in ("engine", "trainer", "both"):
        of_side = [gap for gap in gaps if gap.side == side]
        name = _precision([gap for gap in of_side if not gap.cause], bounds)
        for gap in of_side:
            if gap.cause:
                yield gap
            elif name is None:
                yield replace(gap, cause="unexplained", detail="no suspicion reproduces it")
            else:
                yield replace(gap, cause="precision", detail=name, bound=_USUAL * bounds.largest[name])


def _precision(opened: Sequence[_Gap], bounds: _Rounding) -> str | None:
    """The highest precision whose rounding explains the gaps."""
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
    """The tokens with the largest gap between engine and trainer."""
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
