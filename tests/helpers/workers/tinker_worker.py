"""Rank function of tests/tinker/test_tinker_operations.py: requests on real Operations, under one layout."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from megatron_gvpo.settings.tinker import TinkerConfig
from megatron_gvpo.tinker import checkpoints, wire
from megatron_gvpo.tinker.wire import Refusal

Request = dict[str, Any]  # loss, config, data: [{"tokens": ..., input: ...}, ...]


def encoded(request: Request) -> bytes:
    """A ForwardBackwardRequest as the SDK sends it."""
    message = wire._CLASSES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn=request["loss"])
    for name, value in request.get("config", {}).items():
        message.loss_fn_config_v2[name].number = value
    for columns in request["data"]:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(columns["tokens"], "<i4").tobytes()
        for name, values in columns.items():
            if name == "tokens":
                continue
            is_integer = name in ("target_tokens", "group")
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype, tensor.dense = (
                1 + is_integer,
                np.asarray(values, ("<f4", "<i8")[is_integer]).tobytes(),
            )
            tensor.shape.append(len(values))
    return message.SerializeToString()


def config_of(path: str, directory: str, layout: dict[str, int], **more: Any) -> TinkerConfig:
    return TinkerConfig.model_validate(
        {
            "output_dir": directory,
            "model": {"path": path, "dtype": "float32", **more.pop("model", {})},
            "parallel": layout,
            "serve": {"key": {"env": "TINKER_TEST_KEY"}},
            "max_tokens_per_micro_batch": 24,
            **more,
        }
    )


def run(directory: str) -> None:
    """Carry out the work in DIRECTORY/work.json; rank 0 writes the results."""
    from megatron.core import parallel_state

    from megatron_gvpo.megatron.gradient_export import export_gradients
    from megatron_gvpo.tinker.operations import BASE, Operations

    folder = Path(directory)
    work = json.loads((folder / "work.json").read_text())
    operations = Operations(config_of(work["model"], directory, work["layout"], **work["more"]))
    model, slot = operations._slot.model, operations._slot
    order = {"prompt": [9, 16, 4], "n": 3, "seed": 5, "max_tokens": 6, "prompt_logprobs": True}
    sampling = {"max_tokens": 6, "temperature": 0.5}
    operation = {"kind": "sample", "snapshot": BASE, "orders": [order], "sampling": sampling}
    [cold] = operations.run(operation)["answers"]
    results: dict[str, Any] = {"cold": {**cold, "prompt": order["prompt"]}}
    for name, request in work["requests"].items():
        operations.run({"kind": "create", "model": name})
        operation = {"kind": "forward_backward", "model": name, "body": encoded(request)}
        outcomes = [operations.run(operation) for _ in range(2)]  # their gradients add up
        for buffer, total in zip(model.gradient_buffers(), slot.gradients, strict=True):
            buffer.copy_(total / 2)
        export = None if model.adapters is None else model.export_adapters
        results[name] = {
            "logprobs": [np.frombuffer(part, "<f4").tolist() for part in outcomes[0]["logprobs"]],
            "loss": outcomes[0]["metrics"]["loss:sum"],
            "gradients": export_gradients(model, export),
            "adapters": {} if export is None else {n: t.clone() for n, t in export()},
        }
    results["updated"] = _after_steps(operations, work)
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    parallel_state.destroy_model_parallel()


def _after_steps(operations: Any, work: Any) -> dict[str, Any]:
    """Log-probs of two models that took turns, of the first one's saved and loaded copy, and its samples."""
    request = encoded(work["requests"]["cross_entropy"])
    step = work["step"]

    def both(name: str) -> Any:
        operations.run({"kind": "forward_backward", "model": name, "body": request})
        return operations.run({"kind": "optim_step", "model": name, "step": step})

    def logprobs(name: str) -> list[float]:
        message = wire._CLASSES["ForwardBackwardRequest"]()
        message.ParseFromString(request)
        message.forward_only = True
        outcome = operations.run(
            {"kind": "forward_backward", "model": name, "body": message.SerializeToString()}
        )
        return [float(value) for part in outcome["logprobs"] for value in np.frombuffer(part, "<f4")]

    for name in ("alone", "first", "second"):
        operations.run({"kind": "create", "model": name})
    for _ in range(2):
        both("alone")
    both("first"), both("second"), both("first")
    operations.run({"kind": "create", "model": "scored before its step"})
    operations.run({"kind": "forward_backward", "model": "scored before its step", "body": request})
    logprobs("scored before its step")
    operations.run({"kind": "optim_step", "model": "scored before its step", "step": step})
    result = {"scored before its step": logprobs("scored before its step")}
    path = ["first", "weights", "one"]
    operations.run({"kind": "save", "model": "first", "path": path, "info": {"time": 1.0, "expires": None}})
    operations.run({"kind": "load", "model": "copy", "path": path, "optimizer": True})
    operations.run({"kind": "load", "model": "weights", "path": path, "optimizer": False})
    result |= {name: logprobs(name) for name in ("alone", "first", "second", "copy", "weights")}
    both("first"), both("copy")
    result |= {"first later": logprobs("first"), "copy later": logprobs("copy")}
    operations.run({"kind": "snapshot", "model": "first", "snapshot": "s"})
    order = {"prompt": [9, 16], "n": 3, "seed": 5, "max_tokens": 6, "prompt_logprobs": True}
    outcome = operations.run(
        {"kind": "sample", "snapshot": "s", "orders": [order], "sampling": {"max_tokens": 6}}
    )
    [answer] = outcome["answers"]
    tokens = [[*order["prompt"], *ids] for ids, _, _ in answer["sequences"]]
    scored = {
        "loss": "cross_entropy",
        "data": [{"tokens": t[:-1], "target_tokens": t[1:], "weights": [0] * len(t[1:])} for t in tokens],
    }
    outcome = operations.run({"kind": "forward_backward", "model": "first", "body": encoded(scored)})
    trained = [np.frombuffer(part, "<f4").tolist()[1:] for part in outcome["logprobs"]]
    result["sampled"] = [logps for _, logps, _ in answer["sequences"]], trained
    operations.run({"kind": "forget", "models": ["first"], "snapshots": ["s"]})
    again = {"kind": "sample", "snapshot": "s", "orders": [order], "sampling": {}}
    replaced = {**again, "snapshot": "tinker://first/weights/one@0.5", "path": path}
    unreadable = {"kind": "load", "model": "copy", "path": ["no", "weights", "one"], "optimizer": True}
    broken = {"kind": "forward_backward", "model": "first", "body": request}
    infinite = {"kind": "optim_step", "model": "second", "step": {**step, "lr": 0.0}}
    operations._enter("second")
    operations._slot.gradients[0].fill_(float("inf"))
    result["refusals"] = [_refusal(operations, o) for o in (again, replaced, unreadable, broken, infinite)]
    assert not _refusal(operations, {**replaced, "snapshot": "tinker://first/weights/one@1.0"})
    result["full disk"] = _saved_on_a_full_disk(operations)
    result["copy at the end"] = logprobs("copy")
    result["second at the end"] = logprobs("second")
    return result


def _saved_on_a_full_disk(operations: Any) -> list[str]:
    """Words of the refusal, and the names beside the checkpoint that is there."""

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    info = {"time": 1.0, "expires": None}
    saving = {"kind": "save", "model": "second", "path": ["first", "weights", "two"], "info": info}
    with mock.patch.object(checkpoints.Writer, "write", write):
        refusal = _refusal(operations, saving)
    words = [text for text in ("cannot write", "No space left on device") if text in refusal]
    return [*words, *sorted(path.name for path in (operations._root / "first" / "weights").iterdir())]


def _refusal(operations: Any, operation: dict[str, Any]) -> str:
    try:
        operations.run(operation)
    except Refusal as refusal:
        return str(refusal)
    return ""


def restart(directory: str) -> None:
    """Save a model on one server and load it on the next, for each pair of servers in DIRECTORY/work.json.

    Writes the refusals of a load and of a sample, or "" for none.
    """
    from megatron_gvpo.megatron import parallel
    from megatron_gvpo.tinker.operations import Operations

    folder = Path(directory)
    order = {"prompt": [9], "n": 1, "seed": 5, "max_tokens": 1, "prompt_logprobs": False}
    paths = {kind: ["m", kind, "one"] for kind in ("weights", "sampler_weights")}
    loading = {"kind": "load", "model": "copy", "path": paths["weights"], "optimizer": True}
    sampling = {
        "kind": "sample",
        "snapshot": "tinker://m/sampler_weights/one@1.0",
        "path": paths["sampler_weights"],
        "orders": [order],
        "sampling": {"max_tokens": 1},
    }
    refusals = []
    for first, second in json.loads((folder / "work.json").read_text()):
        operations = Operations(config_of(first["path"], directory, {}, model=first))
        operations.run({"kind": "create", "model": "m"})
        for path in paths.values():
            info = {"time": 1.0, "expires": None}
            operations.run({"kind": "save", "model": "m", "path": path, "info": info})
        parallel.release()
        operations = Operations(config_of(second["path"], directory, {}, model=second))
        refusals.append([_refusal(operations, operation) for operation in (loading, sampling)])
        parallel.release()
    (folder / "refusals.json").write_text(json.dumps(refusals))
