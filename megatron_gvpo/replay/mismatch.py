"""Names the causes of the gap between the engine's and the trainer's log-probs: `megatron-gvpo mismatch`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.observe.rollouts.reader import read_rollouts
from megatron_gvpo.observe.step_records import read, recorded_steps
from megatron_gvpo.replay.findings import Tolerances
from megatron_gvpo.replay.judge import PRECISIONS, ExactJudge, Suspicion, logp_of, suspicions
from megatron_gvpo.replay.model import ModelReplay, Start
from megatron_gvpo.replay.rows import RowsReplay
from megatron_gvpo.runs.one_machine import in_layout
from megatron_gvpo.settings.config import Config

_EARLIER = 3  # earlier versions of the weights that are suspected
_REPRODUCED = 0.25  # a suspicion must leave at most this part of the gap's root mean square
_ROUNDING = 4.0  # rounding may be this many times what transformers has in the same precision
_WORST = 5  # tokens that are shown


@dataclass(frozen=True)
class Cause:
    """A cause of the gap, with its tokens' numbers in nats."""

    side: str  # "engine", "trainer", or "both" for the policy's own change
    name: str
    detail: str
    tokens: int
    responses: int
    share: float  # of the sum of squares of all gaps
    mean: float  # absolute gap
    largest: float
    bound: float | None = None  # the largest gap that rounding in the precision explains

    def is_rounding(self, dtype: str) -> bool:
        """True for what a run in this dtype has without a fault."""
        return self.side == "both" or (self.name == "precision" and self.detail == dtype)


@dataclass(frozen=True)
class Token:
    """A token with a large gap."""

    response: int
    token: int
    text: str
    engine: float
    trainer: float
    judge: float
    cause: str


@dataclass(frozen=True)
class Certificate:
    """The causes of a step's gap, the largest share first."""

    step: int
    dtype: str
    tokens: int
    abs_mean: float
    abs_max: float
    kl: float
    causes: list[Cause] = field(default_factory=list)
    worst: list[Token] = field(default_factory=list)

    @property
    def is_rounding(self) -> bool:
        return all(cause.is_rounding(self.dtype) for cause in self.causes)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class _Response:
    """A response of the step with both sides' log-probs, fp64 [tokens]."""

    position: int
    prompt: list[int]
    ids: list[int]
    version: int  # of the weights that sampled it
    engine: Tensor
    trainer: Tensor


@dataclass(frozen=True)
class _Gap:
    """One side's gap from the judge on one response, and its cause."""

    response: _Response
    side: str
    cause: str
    detail: str
    gap: Tensor


def certify(config: Config, step: int) -> Certificate:
    """Find the causes of the mismatch of a step. Raises DataError without rollouts, weights or records.

    Raises DataError, too, for truncated sampling: rollout files do not hold the supports that both sides'
    log-probs are over, and the judge's would be over the whole vocabulary.
    """
    if config.rollout.wants_support:
        raise DataError(
            "rollout.top_p, top_k or min_p truncates this run's sampling, and `mismatch` cannot judge "
            "log-probs over what is left of the vocabulary: see the run's own metrics mismatch/*"
        )
    responses = _responses(config, step)
    wanted = {step - 1 - k for k in range(_EARLIER + 1)} | {r.version for r in responses}
    wanted |= {r.version - k for r in responses for k in range(_EARLIER + 1)}
    with tempfile.TemporaryDirectory(prefix="mismatch-") as folder:
        judges = _judges(config, step, wanted, Path(folder))
        if step - 1 not in judges:
            raise DataError(f"the weights of step {step - 1} cannot be computed again: see `replay`")
        gaps = [gap for r in responses for gap in _gaps(config, r, judges, step - 1)]
        bounds = _bounds(config, responses, judges[step - 1])
    return _certificate(config, step, responses, list(_named_precision(gaps, bounds, config)), bounds)


def _responses(config: Config, step: int) -> list[_Response]:
    """The step's responses that the engine sampled and the trainer scored."""
    try:
        saved = read_rollouts(config.output_dir, "train", [step]).to_pylist()
    except ValueError as error:
        raise DataError(str(error)) from None
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
            prompt, ids = row["prompt_ids"], row["response_ids"]
            responses.append(_Response(position, prompt, ids, row["version_first"], engine, trainer))
    if not responses:
        raise DataError(
            f"{config.output_dir}: no response of step {step} has log-probs of engine and trainer in the "
            "rollout files (logging.rollouts); those of conversations and images are left out"
        )
    return responses


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
            record = read(config.output_dir, version)
            rows = RowsReplay(local, record, tolerances)
            rows.name_members()
            model.members = rows.members
            if any(finding.outcome == "differs" for finding in model.findings(record)):
                break  # the weights after it cannot be computed again
        if version in wanted:
            directory = folder / str(version)
            model.policy.model.save_hf(directory)
            judges[version] = ExactJudge(directory, version)
    return judges


def _gaps(config: Config, response: _Response, judges: dict[int, ExactJudge], present: int) -> Iterator[_Gap]:
    """The gaps of engine and trainer from the judge, and the policy's own change between their weights."""
    temperature = config.rollout.temperature
    now = logp_of(judges[present].logits(response.prompt, response.ids), response.ids, temperature)
    sampler = judges.get(response.version)
    if sampler is None:
        yield _Gap(response, "engine", "unknown weights", f"step {response.version}", response.engine - now)
    else:
        then = logp_of(sampler.logits(response.prompt, response.ids), response.ids, temperature)
        earlier = [judges[v] for v in sorted(judges, reverse=True) if v < response.version]
        listed = list(
            suspicions(
                [sampler, *earlier], response.prompt, response.ids, config.rollout, _recommended(config)
            )
        )
        yield _explained(response, "engine", response.engine, then, listed)
        if sampler is not judges[present]:
            detail = f"sampled by step {response.version}, as rollout.async_steps allows"
            yield _Gap(response, "both", "the policy's own change", detail, now - then)
    others = [judges[v] for v in sorted(judges, reverse=True) if v < present]
    stale = [
        s
        for s in suspicions([judges[present], *others], response.prompt, response.ids, config.rollout, {})
        if s.cause in ("stale weights", "temperature")
    ]
    yield _explained(response, "trainer", response.trainer, now, stale)


def _explained(
    response: _Response, side: str, logp: Tensor, right: Tensor, listed: Sequence[Suspicion]
) -> _Gap:
    """The gap with the suspicion that reproduces it best; without one its cause is still open."""
    gap = logp - right
    size = float(gap.square().mean().sqrt())
    best, least = None, _REPRODUCED * size
    for suspicion in listed:
        remainder = float((logp - suspicion.logp).square().mean().sqrt())
        if remainder < least:
            best, least = suspicion, remainder
    if best is None:
        return _Gap(response, side, "", "", gap)
    return _Gap(response, side, best.cause, best.detail, gap)


@dataclass(frozen=True)
class _Bound:
    """The rounding errors of a precision in log-probs of these responses, in nats."""

    mean_square: float
    largest: float


def _bounds(config: Config, responses: Sequence[_Response], judge: ExactJudge) -> dict[str, _Bound]:
    """The rounding of transformers in each precision, on a few responses."""
    bounds = {}
    for precision in PRECISIONS:
        errors = []
        for response in responses[:8]:
            exact = judge.logits(response.prompt, response.ids)
            rounded = judge.rounded(precision, response.prompt, response.ids)
            pair = [logp_of(x, response.ids, config.rollout.temperature) for x in (exact, rounded)]
            errors.append(pair[1] - pair[0])
        error = torch.cat(errors)
        bounds[precision] = _Bound(float(error.square().mean()), float(error.abs().max()))
    return bounds


def _named_precision(gaps: Sequence[_Gap], bounds: dict[str, _Bound], config: Config) -> Iterator[_Gap]:
    """The gaps, those within rounding named as precision, and the open ones by the precision that fits."""
    own = config.model.dtype
    for side in ("engine", "trainer", "both"):
        of_side = [gap for gap in gaps if gap.side == side]
        is_rounding = [float(gap.gap.abs().max()) <= _ROUNDING * bounds[own].largest for gap in of_side]
        opened = [g for g, within in zip(of_side, is_rounding, strict=True) if not within and not g.cause]
        name = _precision(opened, bounds)
        for gap, within in zip(of_side, is_rounding, strict=True):
            if side == "both":
                yield gap
            elif within:
                yield _Gap(gap.response, side, "precision", own, gap.gap)
            elif not gap.cause:
                cause = "precision" if name else "unexplained"
                yield _Gap(gap.response, side, cause, name or "no suspicion reproduces it", gap.gap)
            else:
                yield gap


def _precision(opened: Sequence[_Gap], bounds: dict[str, _Bound]) -> str | None:
    """The highest precision whose rounding explains the gaps."""
    if not opened:
        return None
    square = float(torch.cat([gap.gap for gap in opened]).square().mean())
    for precision in PRECISIONS:
        if square <= _ROUNDING**2 * bounds[precision].mean_square:
            return precision
    return None


def _certificate(
    config: Config, step: int, responses: Sequence[_Response], gaps: Sequence[_Gap], bounds: dict[str, _Bound]
) -> Certificate:
    difference_r = torch.cat([response.trainer - response.engine for response in responses])
    total = sum(float(gap.gap.square().sum()) for gap in gaps) or 1.0
    named: dict[tuple[str, str, str], list[_Gap]] = {}
    for gap in gaps:
        named.setdefault((gap.side, gap.cause, gap.detail), []).append(gap)
    causes = []
    for (side, cause, detail), own in named.items():
        gap_r = torch.cat([each.gap for each in own])
        bound = _ROUNDING * bounds[detail].largest if cause == "precision" else None
        share, sizes = float(gap_r.square().sum()) / total, gap_r.abs()
        mean, largest = float(sizes.mean()), float(sizes.max())
        causes.append(Cause(side, cause, detail, len(gap_r), len(own), share, mean, largest, bound))
    causes.sort(key=lambda cause: -cause.share)
    kl = float((torch.expm1(difference_r) - difference_r).mean())
    worst = _worst_tokens(config, responses, gaps)
    sizes = difference_r.abs()
    return Certificate(
        step,
        config.model.dtype,
        len(difference_r),
        float(sizes.mean()),
        float(sizes.max()),
        kl,
        causes,
        worst,
    )


def _worst_tokens(config: Config, responses: Sequence[_Response], gaps: Sequence[_Gap]) -> list[Token]:
    """The tokens with the largest gap between engine and trainer."""
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    positions = [(r, t) for r in responses for t in range(len(r.ids))]
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
                tokenizer.decode([response.ids[t]]),
                float(response.engine[t]),
                float(response.trainer[t]),
                float(judge),
                f"{largest.side}: {largest.cause}",
            )
        )
    return tokens


def _recommended(config: Config) -> dict[str, Any]:
    """The sampling in the model's generation_config.json; empty without one."""
    try:
        values = json.loads((Path(config.model.path) / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
