"""Servers map and write in runs' directories of shared memory alone, and read weights in their run's."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed.rendezvous  # noqa: F401 - the plugin looks for it

from megatron_gvpo.core.store import host_store
from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.weights.group import WeightGroup
from megatron_gvpo.weights.node import new_name

sys.path.append(str(PLUGINS))
import megatron_gvpo_mends
from megatron_gvpo_memory import BucketLayout, in_memory, in_weights, tell_gpus


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory of shared memory."""
    monkeypatch.setenv("MEGATRON_GVPO_MEMORY", str(tmp_path))
    directory = tmp_path / new_name()
    directory.mkdir(mode=0o700)
    return directory


def test_a_runs_own_files_are_mapped_and_written(run: Path):
    (run / "bucket").write_bytes(bytes(range(6)))
    assert BucketLayout(["w"], ["uint8"], [[4]]).mapped(str(run / "bucket")).tolist() == [0, 1, 2, 3]
    tell_gpus(str(run / "0.told"))
    assert len(list(run.glob("0.told.*"))) == 1
    tell_gpus(str(run.with_name(new_name()) / "0.told"))  # of another node


def test_a_file_is_never_made_longer(run: Path):
    (run / "bucket").write_bytes(bytes(6))
    with pytest.raises(ValueError, match=r"bucket: 6 bytes, and the bucket has 7"):
        BucketLayout(["w"], ["uint8"], [[7]]).mapped(str(run / "bucket"))
    assert (run / "bucket").stat().st_size == 6


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/tmp/bucket",
        "bucket",
        "{run}/../bucket",
        "{run}/../../etc/bucket",
        "{run}/more/bucket",
        "{run}/.bashrc",
        "{run}",
        "{run}x/bucket",
        "{root}/bucket",
    ],
)
def test_any_other_path_is_refused(path: str, run: Path):
    path = path.format(run=run, root=run.parent)
    for use in (in_memory, tell_gpus, BucketLayout([], [], []).mapped):
        with pytest.raises(PermissionError):
            use(path)
    assert list(run.iterdir()) == []


def test_links_and_what_others_can_write_are_refused(run: Path, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(8))
    (run / "bucket").symlink_to(victim)
    linked = tmp_path / new_name()
    linked.symlink_to(run, target_is_directory=True)
    opened = tmp_path / new_name()
    opened.mkdir()
    opened.chmod(0o770)
    for path in (run / "bucket", linked / "1.told", opened / "bucket"):
        with pytest.raises(PermissionError, match=r"not this user's own, or a link, or others can write it"):
            in_memory(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away takes root")
def test_another_users_directory_is_refused(run: Path):
    os.chown(run, 12345, 12345)
    with pytest.raises(PermissionError, match="not this user's own"):
        in_memory(str(run / "bucket"))


def test_weights_are_read_where_the_configuration_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own, other = tmp_path / "weights", tmp_path / "other"
    for directory in (own / "version_1", other):
        directory.mkdir(parents=True)
        (directory / "model-0.safetensors").touch()
    with pytest.raises(PermissionError, match="without MEGATRON_GVPO_WEIGHTS"):
        monkeypatch.delenv("MEGATRON_GVPO_WEIGHTS", raising=False)
        in_weights(str(own))
    monkeypatch.setenv("MEGATRON_GVPO_WEIGHTS", str(own))
    assert in_weights(str(own / "version_1")) == [own / "version_1" / "model-0.safetensors"]
    (own / "linked").symlink_to(other)
    (own / "version_2").mkdir()
    (own / "version_2" / "a.safetensors").symlink_to(other / "model-0.safetensors")
    for directory in (other, own / ".." / "other", own / "linked", own / "version_2", Path("/")):
        with pytest.raises(PermissionError, match=r"reads weights in .*weights alone"):
            in_weights(str(directory))


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}


def test_stores_listen_at_their_address_alone():
    """The trainer's, the weight group's, and those of the engines: torch's own listens everywhere."""
    before = listening()
    soon = timedelta(seconds=10)
    stores = [host_store("127.0.0.1", 0, 1, soon), host_store("localhost", 0, 1, soon)]
    stores.append(WeightGroup("127.0.0.1", 2, "gloo", 10.0, 10.0))
    stores.append(megatron_gvpo_mends.bound_store("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False))
    new = listening() - before
    assert len(new) >= 4 and {address for address, _ in new} <= {"127.0.0.1", "::1"}
    stores[0].set("a", "b")
    assert stores[3].port != stores[0].port and stores[0].get("a") == b"b"


def test_a_port_that_is_taken_is_named():
    store = host_store("127.0.0.1", 0, 1, timedelta(seconds=10))
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{store.port}: Address already in use"):
        host_store("127.0.0.1", store.port, 1, timedelta(seconds=10))
