"""A transport that the package does not have: this file adds it, and a run uses it by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import tiny_run
import torch
from servers.real_servers import PROMPTS, SharedServer, logprobs, served_config

from megatron_gvpo.config.schema import Config, ConfigError, load_config
from megatron_gvpo.rollout.pool import ServerHandle
from megatron_gvpo.rollout.server import Server
from megatron_gvpo.weights.bucket import Bucket, TensorSpec
from megatron_gvpo.weights.node import NodeMemory, new_name
from megatron_gvpo.weights.receivers import RECEIVERS, receiver_class
from megatron_gvpo.weights.receivers.sglang import PluginReceiver
from megatron_gvpo.weights.receivers.vllm import VLLMReceiver
from megatron_gvpo.weights.transport import Transport, each
from megatron_gvpo.weights.transports import TRANSPORTS

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


class RawFiles(Transport):
    """Writes the bytes of each bucket to a file, which the servers load before the next bucket."""

    colocated_ok = False  # it could be: the test of the checks wants one that is not

    def __init__(self, receiver: Callable[[Server], Any], memory: NodeMemory, timeout: float) -> None:
        self._receiver, self._memory, self._timeout = receiver, memory, timeout
        self._file = memory.directory / "bucket"  # servers map files of runs' directories alone
        self._buckets = 0

    @classmethod
    def create(cls, config: Config, receiver: Callable[[Server], Any], device: torch.device) -> Self:
        return cls(receiver, NodeMemory(new_name(), torch.device("cpu")), config.rollout.weights.timeout)

    @property
    def metrics(self) -> dict[str, float]:
        return {"sync/buckets": float(self._buckets)}

    async def begin(self, handles: Sequence[ServerHandle], version: int) -> None:
        self._handles, self._version, self._buckets = list(handles), version, 0
        await each(self._handles, lambda m: self._receiver(m.server).begin_update(self._timeout))

    async def send(self, bucket: Bucket) -> int:
        await asyncio.to_thread(self._file.write_bytes, bucket.flat.cpu().numpy().tobytes())
        self._buckets += 1
        await each(
            self._handles,
            lambda m: self._receiver(m.server).load_raw(bucket.specs, self._file, self._timeout),
        )
        return bucket.flat.nbytes

    async def end(self) -> None:
        version = str(self._version)
        await each(self._handles, lambda m: self._receiver(m.server).end_update(version, self._timeout))

    async def close(self) -> None:
        self._memory.close()


class SGLangRawFiles(PluginReceiver):
    async def load_raw(self, specs: Sequence[TensorSpec], file: Path, timeout: float) -> None:
        tensors = [[spec.name, spec.dtype, spec.shape] for spec in specs]
        await self.order_all({"op": "load", "tensors": tensors, "file": str(file)}, timeout)


class VLLMRawFiles(VLLMReceiver):
    async def load_raw(self, specs: Sequence[TensorSpec], file: Path, timeout: float) -> None:
        await self.update(specs, timeout, file=str(file))


@pytest.fixture
def raw_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the transport and its receivers: nothing else is needed."""
    monkeypatch.setitem(TRANSPORTS, "raw_files", f"{__name__}:RawFiles")
    monkeypatch.setitem(RECEIVERS["sglang"], "raw_files", SGLangRawFiles)
    monkeypatch.setitem(RECEIVERS["vllm"], "raw_files", VLLMRawFiles)


def scores(served: SharedServer) -> torch.Tensor:
    """The server's log-probs of all tokens of PROMPTS but each first."""
    return torch.tensor([logp for prompt in PROMPTS for logp in served.client("score", prompt)])


@pytest.mark.parametrize("served", ["vllm"], indirect=True)
def test_a_run_trains_with_a_transport_that_the_package_does_not_have(
    served: SharedServer, raw_files: None, task: Path, tmp_path: Path
):
    """After each step the server has the policy's weights: at the end its log-probs are the export's."""
    out = tmp_path / "run"
    config = served_config(
        served.engine,
        task,
        out,
        f"rollout.servers.urls=[{served.url}]",
        "rollout.weights.transport=raw_files",
        "rollout.weights.bucket_mb=1",
        "algorithm=gvpo",
        "train.mini_batches=2",
        "train.steps=2",
        "data.eval=null",
        "optimizer={lr: 1.0e-2, warmup_steps: 0}",
    )
    before = scores(served)
    tiny_run.fit(config)
    found = scores(served)
    served.client.receiver("disk", "load_directory", task / "model", "as before")
    expected = torch.cat([logprobs(out / "hf", prompt[:1], prompt[1:]) for prompt in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert (found - before).abs().mean() > 0.01, "training changed the weights"
    buckets = [record["sync/buckets"] for record in tiny_run.records(out) if "sync/buckets" in record]
    assert len(buckets) == 2 and min(buckets) > 1


def test_a_new_transports_name_and_limits_are_those_of_its_class(
    good: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """The name is unknown until it is registered; then the checks ask the class."""
    chosen = ["rollout.engine=sglang", "rollout.weights.transport=raw_files"]
    names = "'broadcast', 'sharded', 'delta', 'shared', 'disk' or 'adapter'"
    unknown = rf"transport: Input should be {names} \(given: 'raw_files'\)"
    with pytest.raises(ConfigError, match=unknown):
        load_config([good], chosen)
    request.getfixturevalue("raw_files")
    assert load_config([good], chosen).rollout.weights.transport == "raw_files"
    with pytest.raises(ConfigError, match=r"transport=raw_files.*\(rollout\.servers\.colocated\)"):
        load_config([good], [*chosen, "rollout.servers.colocated=true"])
    monkeypatch.delitem(RECEIVERS["vllm"], "raw_files")
    with pytest.raises(ConfigError, match=r"raw_files does not reach servers of rollout\.engine=vllm"):
        receiver_class("vllm", "raw_files")
