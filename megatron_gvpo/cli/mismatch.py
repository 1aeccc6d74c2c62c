"""`megatron-gvpo mismatch`: name the causes of the gap between the engine's and the trainer's log-probs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import say
from megatron_gvpo.cli.with_model import run_with_model

if TYPE_CHECKING:
    from megatron_gvpo.replay.certificate import Certificate


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "mismatch", help="name the causes of the gap between the engine's and the trainer's log-probs"
    )
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="output directory of a run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="paths that are others on this machine"
    )
    configured.add_step(parser, "the step (default: the last recorded one)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: rounding explains the gap; 1: it has another cause; 2: wrong input. Raises ConfigError.

    The certificate is also written to RUN/mismatch.json, which the report shows.
    """
    from megatron_gvpo.runs.one_machine import check_model_is_there, load_run

    directory: Path = options.run_directory
    check_model_is_there(load_run(directory, options.overrides))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the judge computes in float64, on the CPU
    # A step that is named needs no record of its own where the checkpoint before it was kept.
    step = configured.recorded_step(options) if options.step is None else options.step
    config = load_run(directory, options.overrides, step)
    certificates: list[Certificate] = []

    def work() -> None:
        from megatron_gvpo.replay.mismatch import certify

        certificate = certify(config, step)
        certificates.append(certificate)
        certificate.write(directory / "mismatch.json")
        for line in lines(certificate):
            say(line)

    code = run_with_model(work)
    return code or int(any(not certificate.is_rounding for certificate in certificates))


def lines(certificate: Certificate) -> Iterator[str]:
    """The certificate as text: the gap, its causes, the worst tokens, the verdict."""
    yield (
        f"step {certificate.step}: {certificate.tokens} tokens; |trainer - engine| "
        f"{certificate.abs_mean:.2g} on average, {certificate.abs_max:.2g} at most; "
        f"KL {certificate.kl:.2g} nats a token"
    )
    if certificate.left_out:
        yield (
            f"without {certificate.left_out} responses of later mini-batches: the trainer scored them "
            "after the step's first update"
        )
    yield f"{'side':<9}{'cause':<25}{'share':>7}{'mean':>10}{'largest':>10}{'bound':>10}  detail"
    for cause in certificate.causes:
        bound = "" if cause.bound is None else f"{cause.bound:.2g}"
        yield (
            f"{cause.side:<9}{cause.name:<25}{cause.share:>7.1%}{cause.mean:>10.2g}{cause.largest:>10.2g}"
            f"{bound:>10}  {cause.detail} ({cause.responses} responses)"
        )
    for token in certificate.worst:
        yield (
            f"response {token.response}, token {token.token} {token.text!r}: engine {token.engine:.4f}, "
            f"trainer {token.trainer:.4f}, judge {token.judge:.4f} ({token.cause})"
        )
    if certificate.is_rounding:
        yield f"rounding in {certificate.dtype} explains the gap on both sides"
    else:
        first = next(cause for cause in certificate.causes if not cause.is_rounding(certificate.dtype))
        yield f"the gap is not rounding in {certificate.dtype}: {first.side}, {first.name}, {first.detail}"
