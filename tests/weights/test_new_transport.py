"""A transport that the package does not have: this file adds it, and a run uses it by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from helpers import tiny_run
from helpers.servers.real_servers import ENGINES, PROMPTS, SGLANG_FIRST, SharedServer, logprobs, served_config

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.servers.server import Server
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.transports import TRANSPORTS, Traits
from megatron_gvpo.weights.bucket import Bucket, TensorSpec
from megatron_gvpo.weights.node import NodeMemory, new_name
from megatron_gvpo.weights.receivers import RECEIVERS, receiver_class
from megatron_gvpo.weights.receivers.sglang import PluginReceiver
from megatron_gvpo.weights.receivers.vllm import VLLMReceiver
from megatron_gvpo.weights.transport import PushSettings, Transport, each

CHOSEN = ["rollout.engine=sglang", "rollout.weights.transport=raw_files"]
ADAPTER = "model.adapter={rank: 8}"
SPECULATION = "rollout.speculation.method"

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


class RawFiles(Transport):
    """Writes the bytes of each bucket to a file, which the servers load before the next bucket."""

    def __init__(self, receiver: Callable[[Server], Any], memory: NodeMemory, timeout: float) -> None:
        self._receiver, self._memory, self._timeout = receiver, memory, timeout
        self._file = memory.directory / "bucket"  # servers map files of runs' directories alone
        self._buckets = 0

    @classmethod
    def create(cls, settings: PushSettings, receiver: Callable[[Server], Any]) -> Self:
        return cls(receiver, NodeMemory(new_name(), torch.device("cpu")), settings.rollout.weights.timeout)

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


PLACE = f"{__name__}:RawFiles"


@pytest.fixture
def raw_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the transport and its receivers: nothing else is needed."""
    monkeypatch.setitem(TRANSPORTS, "raw_files", Traits(PLACE))
    monkeypatch.setitem(RECEIVERS["sglang"], "raw_files", SGLangRawFiles)
    monkeypatch.setitem(RECEIVERS["vllm"], "raw_files", VLLMRawFiles)


def scores(served: SharedServer) -> torch.Tensor:
    """The server's log-probs of all tokens of PROMPTS but each first."""
    return torch.tensor([logp for prompt in PROMPTS for logp in served.client("score", prompt)])


@pytest.mark.parametrize("served", SGLANG_FIRST, indirect=True)
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
    after = scores(served)
    served.client.receiver("disk", "load_directory", task / "model", "as before")
    served.client("flush_cache")  # of the prompts that the other weights have read
    expected = torch.cat([logprobs(out / "hf", prompt[:1], prompt[1:]) for prompt in PROMPTS])
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-3)
    assert (after - before).abs().mean() > 0.01, "training changed the weights"
    buckets = [record["sync/buckets"] for record in tiny_run.records(out) if "sync/buckets" in record]
    assert len(buckets) == 2 and min(buckets) > 1


def test_a_new_transports_name_is_unknown_until_it_is_registered(
    good: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    names = "'broadcast', 'sharded', 'colocated', 'delta', 'shared', 'disk' or 'adapter'"
    unknown = rf"transport: Input should be {names} \(given: 'raw_files'\)"
    with pytest.raises(ConfigError, match=unknown):
        load_config([good], CHOSEN)
    request.getfixturevalue("raw_files")
    assert load_config([good], CHOSEN).rollout.weights.transport == "raw_files"
    monkeypatch.delitem(RECEIVERS["vllm"], "raw_files")
    with pytest.raises(ConfigError, match=r"raw_files does not reach servers of rollout\.engine=vllm"):
        receiver_class("vllm", "raw_files")


@pytest.mark.parametrize(
    ("trait", "overrides", "message"),
    [
        ({"colocated_ok": False}, ["rollout.servers.colocated=true"], "servers on the trainer's own GPUs"),
        ({"nodes_ok": False}, ["rollout.servers={tp: 2, nodes: 2}"], "with rollout.servers.nodes=2"),
        ({"sends_adapter": True}, [], "sends the adapter that trains"),
        ({"sends_adapter": True}, [ADAPTER, f"{SPECULATION}=ngram"], "not tested; use broadcast"),
        ({"sends_files": True}, [f"{SPECULATION}=mtp"], "SGLang would load the policy's files"),
        ({"sends_own": True}, [ADAPTER], "with model.adapter: it sends what each rank holds"),
    ],
)
def test_the_checks_ask_for_its_traits(
    task: Path,
    monkeypatch: pytest.MonkeyPatch,
    trait: dict[str, bool],
    overrides: list[str],
    message: str,
):
    """A transport without the trait is possible with the same settings."""

    def check(**traits: bool) -> None:
        monkeypatch.setitem(TRANSPORTS, "raw_files", Traits(PLACE, **traits))
        check_layout(load_config([task / "run.yaml"], [*CHOSEN, "output_dir=run", *overrides]), 1)

    check(**dict.fromkeys(trait, not trait[next(iter(trait))]))
    with pytest.raises(ConfigError, match=f"transport=raw_files.*{message}"):
        check(**trait)


@pytest.mark.parametrize("engine", ENGINES)
def test_servers_start_with_room_for_what_it_sends(
    task: Path, raw_files: None, monkeypatch: pytest.MonkeyPatch, engine: str
):
    own = [*CHOSEN, f"rollout.engine={engine}", ADAPTER, "output_dir=run"]
    config = load_config([task / "run.yaml"], own)
    launch = partial(
        DIALECTS[engine].launch, config.model, config.rollout, ModelCards(config), 1, None, on_gpu=False
    )
    assert "--enable-lora" not in launch().command
    monkeypatch.setitem(TRANSPORTS, "raw_files", Traits(PLACE, sends_adapter=True))
    assert "--enable-lora" in launch().command
