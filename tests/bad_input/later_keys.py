"""Keys that came after the other classes were tried: teachers, divergences, importance and
speculation; adapters and images are in later_models.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_input.case import TRAIN, Case, Expected

GRPO, OPD, FULL = "algorithm=grpo", "algorithm=opd", "algorithm=opd_full"
VLLM, SGLANG = "rollout.engine=vllm", "rollout.engine=sglang"
DRAFT = "rollout.speculation={method: draft, model: model}"


def keys(
    name: str,
    *overrides: str,
    says: tuple[str, ...],
    spoil: Callable[[Path], object] = lambda _: None,
    expected: Expected = "refused",
) -> Case:
    """A bad value. The interpreter seems to have both engines, so that the checks after it are reached."""

    def with_engines(task: Path) -> None:
        spoil(task)
        (task / "engines").mkdir()
        for engine in ("vllm", "sglang"):
            (task / "engines" / f"{engine}.py").touch()

    environment = {"PYTHONPATH": "engines"}
    return Case("later keys", name, (*TRAIN, *overrides), with_engines, expected, says, environment)


def teacher(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    """Copies the policy to the directory `teacher`, and changes that."""

    def spoil(task: Path) -> None:
        shutil.copytree(task / "model", task / "teacher")
        for change in changes:
            change(task / "teacher")

    return spoil


def of_config(**values: Any) -> Callable[[Path], object]:
    """Sets keys of a model's config.json."""

    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def vocabulary(old: str, new: str) -> Callable[[Path], object]:
    """Replaces text in a model's tokenizer.json."""

    def change(model: Path) -> None:
        file = model / "tokenizer.json"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return change


def without(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).unlink()


TEACHERS = [
    keys("opd without a teacher", OPD, says=("teacher.path",)),
    keys("a teacher that nothing reads", GRPO, "teacher.path=model", says=("teacher",)),
    keys("a teacher that is not there", OPD, "teacher.path=nobody", says=("teacher.path",)),
    keys("a teacher that is a file", OPD, "teacher.path=run.yaml", says=("teacher.path",)),
    keys("a teacher without a path", OPD, "teacher={server: null}", says=("path",)),
    keys(
        "a teacher with another token",
        OPD,
        "teacher.path=teacher",
        says=("teacher.path",),
        spoil=teacher(vocabulary('"9": ', '"ninth": ')),
    ),
    keys(
        "a teacher without a tokenizer",
        OPD,
        "teacher.path=teacher",
        says=("teacher.path",),
        spoil=teacher(without("tokenizer.json")),
    ),
    keys(
        "a teacher without weights",
        OPD,
        "teacher.path=teacher",
        says=("teacher",),
        spoil=teacher(without("model.safetensors")),
    ),
    keys(
        "a teacher of a family that nobody knows",
        OPD,
        "teacher.path=teacher",
        says=("teacher.path",),
        spoil=teacher(of_config(architectures=["ParrotForCausalLM"], model_type="parrot")),
    ),
    keys(
        "a teacher with fewer positions",
        OPD,
        "teacher.path=teacher",
        says=("teacher.path",),
        spoil=teacher(of_config(max_position_embeddings=12)),
    ),
    keys(
        "a teacher whose sizes contradict its weights",
        OPD,
        "teacher.path=teacher",
        says=("teacher",),
        spoil=teacher(of_config(hidden_size=96)),
    ),
    keys(
        "a teacher with a smaller vocabulary",
        OPD,
        "teacher.path=teacher",
        says=("teacher", "vocab_size"),
        spoil=teacher(of_config(vocab_size=8)),
    ),
    keys(
        "a teacher's server of no engine",
        OPD,
        "teacher={path: model, server: {engine: torch}}",
        says=("engine",),
    ),
    keys(
        "a teacher's server at another temperature",
        OPD,
        "rollout.temperature=0.7",
        "teacher={path: model, server: {engine: vllm, urls: ['http://127.0.0.1:9']}}",
        says=("temperature",),
    ),
    keys(
        "a teacher's server for the whole vocabulary",
        FULL,
        "teacher={path: model, server: {engine: vllm, urls: ['http://127.0.0.1:9']}}",
        says=("divergence",),
    ),
    keys(
        "a teacher's server at a bad address",
        OPD,
        "teacher={path: model, server: {engine: vllm, urls: ['127.0.0.1']}}",
        says=("urls",),
    ),
    keys(
        "a teacher that nobody serves",
        OPD,
        "teacher={path: model, server: {engine: vllm, urls: ['http://127.0.0.1:9'], start_timeout: 2}}",
        says=("127.0.0.1:9",),
    ),
    keys(
        "a teacher's weight of -1", OPD, "teacher.path=model", "algorithm.estimator.coef=-1", says=("coef",)
    ),
    keys(
        "a teacher's discount of 1.5",
        OPD,
        "teacher.path=model",
        "algorithm.estimator.discount=1.5",
        says=("discount",),
    ),
    keys(
        "a policy that learns from itself",
        OPD,
        "algorithm.estimator.reference=step_start",
        says=("reference",),
    ),
    keys(
        "a reference that nobody knows", OPD, "algorithm.estimator.reference=headmaster", says=("reference",)
    ),
    keys(
        "a teacher that may run code: yes",
        OPD,
        "teacher={path: model, trust_remote_code: maybe}",
        says=("trust_remote_code",),
    ),
]
DIVERGENCES = [
    keys(
        "no such divergence",
        FULL,
        "teacher.path=model",
        "algorithm.loss.divergence=sideways",
        says=("divergence",),
    ),
    keys(
        "beta for reverse",
        FULL,
        "teacher.path=model",
        "algorithm.loss.divergence={name: reverse, beta: 0.5}",
        says=("beta",),
    ),
    keys(
        "beta of 1",
        FULL,
        "teacher.path=model",
        "algorithm.loss.divergence={name: js, beta: 1}",
        says=("beta",),
    ),
    keys(
        "top_k of 0",
        FULL,
        "teacher.path=model",
        "algorithm.loss.divergence={name: js, top_k: 0}",
        says=("top_k",),
    ),
    keys(
        "top_k of true",
        FULL,
        "teacher.path=model",
        "algorithm.loss.divergence={name: js, top_k: true}",
        says=("top_k",),
    ),
    keys(
        "top_k beyond the vocabulary",
        FULL,
        "teacher.path=model",
        "algorithm.loss.divergence={name: js, top_k: 1000000000}",
        says=("top_k",),
    ),
    keys(
        "a divergence of weight 0",
        FULL,
        "teacher.path=model",
        "algorithm.loss.divergence={name: js, coef: 0}",
        says=("coef",),
    ),
    keys(
        "a divergence from the policy itself",
        GRPO,
        "algorithm.loss.divergence={name: reverse, reference: step_start}",
        says=("reference",),
    ),
    keys("a divergence without a teacher", GRPO, "algorithm.loss.divergence=reverse", says=("teacher",)),
    keys("a loss of nothing", "algorithm.loss={name: distill, divergence: null}", says=("divergence",)),
    keys(
        "a divergence that is a list",
        FULL,
        "teacher.path=model",
        "algorithm.loss.divergence=[reverse, js]",
        says=("divergence",),
    ),
]
CORRECTIONS = [
    keys("no such correction", GRPO, "algorithm.loss.importance=hope", says=("importance",)),
    keys(
        "importance for a loss without",
        "algorithm=gvpo",
        "algorithm.loss.importance=truncate",
        says=("importance",),
    ),
    keys("a cap below 1", GRPO, "algorithm.loss.importance={name: truncate, cap: 0.5}", says=("cap",)),
    keys(
        "a cap that is not a number",
        GRPO,
        "algorithm.loss.importance={name: truncate, cap: .nan}",
        says=("cap",),
    ),
    keys("a cap without end", GRPO, "algorithm.loss.importance={name: truncate, cap: .inf}", says=("cap",)),
    keys("no such level", GRPO, "algorithm.loss.importance={name: truncate, level: word}", says=("level",)),
    keys(
        "bounds with nothing between",
        GRPO,
        "algorithm.loss.importance={name: mask, low: 2, high: 1}",
        says=("low",),
    ),
    keys("a low bound below 0", GRPO, "algorithm.loss.importance={name: mask, low: -1}", says=("low",)),
    keys("a veto of 1", GRPO, "algorithm.loss.importance={name: reject, veto: 1}", says=("veto",)),
    keys(
        "bounds that no ratio meets",
        GRPO,
        "algorithm.loss.importance={name: mask, low: 1000000, high: 1000001}",
        says=("low", "high"),
    ),
    keys(
        "a veto for truncation", GRPO, "algorithm.loss.importance={name: truncate, veto: 0.1}", says=("veto",)
    ),
    keys(
        "importance without engine log-probs",
        "algorithm=sft",
        "algorithm.loss.importance=truncate",
        says=("importance",),
    ),
]
SPECULATION = [
    keys(
        "speculation in the embedded engine",
        GRPO,
        "rollout.speculation={method: ngram}",
        says=("speculation",),
    ),
    keys("no such method", GRPO, VLLM, "rollout.speculation={method: guess}", says=("method",)),
    keys("no tokens", GRPO, VLLM, "rollout.speculation={method: ngram, tokens: 0}", says=("tokens",)),
    keys("tokens: true", GRPO, VLLM, "rollout.speculation={method: ngram, tokens: true}", says=("tokens",)),
    keys(
        "a thousand tokens", GRPO, VLLM, "rollout.speculation={method: ngram, tokens: 1000}", says=("tokens",)
    ),
    keys("a draft without a model", GRPO, VLLM, "rollout.speculation={method: draft}", says=("model",)),
    keys(
        "a model for n-grams",
        GRPO,
        VLLM,
        "rollout.speculation={method: ngram, model: model}",
        says=("model",),
    ),
    keys(
        "a draft that is not there",
        GRPO,
        VLLM,
        "rollout.speculation={method: draft, model: nobody}",
        says=("speculation.model",),
    ),
    keys(
        "a draft with another vocabulary",
        GRPO,
        VLLM,
        "rollout.speculation={method: draft, model: teacher}",
        says=("speculation.model",),
        spoil=teacher(of_config(vocab_size=9)),
    ),
    keys(
        "a draft without weights",
        GRPO,
        VLLM,
        "rollout.speculation={method: draft, model: teacher}",
        says=("speculation.model",),
        spoil=teacher(without("model.safetensors")),
    ),
    keys("heads that the model lacks", GRPO, VLLM, "rollout.speculation={method: mtp}", says=("mtp",)),
    keys("suffixes on SGLang", GRPO, SGLANG, "rollout.speculation={method: suffix}", says=("suffix",)),
    keys("drafts on SGLang without a GPU", GRPO, SGLANG, DRAFT, says=("speculation",)),
    keys(
        "a server's own speculation",
        GRPO,
        VLLM,
        "rollout.servers.args=['--speculative-config', '{}']",
        says=("--speculative-config",),
    ),
    keys(
        "speculation with replayed routers",
        GRPO,
        VLLM,
        DRAFT,
        "rollout.router_replay=true",
        says=("router_replay",),
    ),
    keys(
        "an EAGLE head that is a whole model",
        GRPO,
        VLLM,
        "rollout.speculation={method: eagle, model: model}",
        says=("speculation",),
    ),
]

LATER_KEYS = [*TEACHERS, *DIVERGENCES, *CORRECTIONS, *SPECULATION]
