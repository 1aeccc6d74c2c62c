"""The files of a checkpoint directory: damage is named, and nothing that a file names is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from megatron_gvpo.core.errors import CheckpointError, DamagedCheckpointError
from megatron_gvpo.huggingface.checksums import FILE as CHECKSUMS
from megatron_gvpo.megatron.checkpoint.load import open_checkpoint
from megatron_gvpo.megatron.checkpoint.save import _finish, _make_empty
from megatron_gvpo.megatron.checkpoint.storage import FilesWriter, SafeLoadPlanner

SMALL, LARGE = torch.arange(12.0).view(3, 4), torch.arange(300_000.0)  # the second has more than 1 MiB
STATE = {"step": 7, "rates": [0.5, 1e-3]}


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save([value], file)
    return file


def write(directory: Path, values: object = STATE) -> Path:
    state = {"small": SMALL, "large": LARGE, "common_state/shard_0_1": saved(values)}
    planner = MCoreSavePlanner(flatten_state_dict=False)
    torch_checkpoint.save(state, storage_writer=FilesWriter(directory), planner=planner, no_dist=True)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return directory


def read(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    reader = open_checkpoint(directory)
    state: dict[str, Any] = {
        "small": torch.zeros(3, 4),
        "large": torch.zeros(300_000, dtype=dtype),
        "common_state/shard_0_1": io.BytesIO(),
    }
    planner = SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        torch_checkpoint.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except torch_checkpoint.CheckpointException as error:
        raise error.failures[0][0] from None
    return state


def assert_whole(state: dict[str, Any]) -> None:
    assert torch.equal(state["small"], SMALL) and torch.equal(state["large"], LARGE)
    assert state["common_state/shard_0_1"] == [STATE]


class Runs:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.file),)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert_whole(read(write(tmp_path / "new")))
    other = read(tmp_path / "new", torch.float64)  # a target that it cannot be read into at once
    assert torch.equal(other["large"], LARGE.double())
    (tmp_path / "new" / CHECKSUMS).unlink()  # as earlier versions wrote it
    assert_whole(read(tmp_path / "new"))
    assert torch.equal(read(tmp_path / "new", torch.float64)["large"], LARGE.double())


@pytest.mark.parametrize(("best", "names"), [(None, [5]), (0, [0, 5])])
def test_a_checkpoint_of_no_step_goes_like_others(tmp_path: Path, best: int | None, names: list[int]) -> None:
    """A run that is interrupted in its first step writes it. Fails on the old code, which always kept it."""
    for step in (0, 5):
        partial = tmp_path / f"step_{step:08d}.partial"
        partial.mkdir()
        _finish(partial, partial.with_suffix(""), json.dumps({"step": step}), keep=1, best=best)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in names]


def test_what_a_failed_save_left_makes_room_for_the_next(tmp_path: Path) -> None:
    """Fails on the old code, which removed it after the next save: a full disk stayed full."""
    for name in ("step_00000001", "step_00000002.partial", "step_00000003.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    _make_empty(tmp_path / "step_00000003.partial")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000003.partial"]
    assert not list((tmp_path / "step_00000003.partial").iterdir())


def test_flipped_bits_are_named_or_change_nothing(tmp_path: Path) -> None:
    """Bits anywhere in any file, and files that are cut off or gone."""
    intact = write(tmp_path / "whole")
    draw, noticed = random.Random(0), 0
    for file in sorted(intact.iterdir()):
        content = file.read_bytes()
        for _ in range(60):
            changed = bytearray(content)
            offset = draw.randrange(len(changed) if draw.random() < 0.5 else min(len(changed), 3000))
            changed[offset] ^= 1 << draw.randrange(8)
            cut = draw.random() < 0.1
            file.write_bytes(changed[:offset] if cut else changed)
            try:
                assert_whole(read(intact))
            except DamagedCheckpointError as error:
                noticed += 1
                assert str(file) in str(error) or file.name == CHECKSUMS, error
                assert "\n" not in str(error)
            file.write_bytes(content)
    assert noticed > 200
    for file in sorted(intact.iterdir()):
        if file.name != CHECKSUMS:
            content = file.read_bytes()
            file.unlink()
            with pytest.raises(DamagedCheckpointError, match=f"{file.name} is missing"):
                read(intact)
            file.write_bytes(content)
    assert_whole(read(intact))


@pytest.mark.parametrize("value", ["1e39", "-2", "true", '"3"', "[]", "{}", "null"])
def test_checksums_that_are_none(tmp_path: Path, value: str) -> None:
    directory = write(tmp_path)
    for content in (value, f'{{"algorithm": "xxh3_64", "entries": {value}}}'):
        (directory / CHECKSUMS).write_text(content)
        with pytest.raises(DamagedCheckpointError, match=r"checksums.json|\.metadata"):
            read(directory)


def hostile_lists(marker: Path, good: bytes) -> dict[str, bytes]:
    """Contents of .metadata that would run something, and how."""
    listed = pickle.loads(good)
    listed.planner_data = Runs(marker)
    inside = pickle.dumps(listed)
    keyed = Metadata({}, storage_data={Runs(marker): 1})
    return {
        "at once": pickle.dumps(Runs(marker)),
        "in a list that is right": inside,
        "as a key": pickle.dumps(keyed),
        "by torch": b"ctorch.storage\n_load_from_bytes\n(C\x03abctR.",
        "by an old name": b"c__builtin__\neval\n(V__import__('os').mkdir('x')\ntR.",
        "by a part of a name": b"\x80\x04\x8c\x20torch.distributed.checkpoint.api\x8c\x08os.mkdir\x93.",
    }


def test_a_list_of_tensors_runs_nothing(tmp_path: Path) -> None:
    directory, marker = write(tmp_path / "checkpoint"), tmp_path / "ran"
    good = (directory / ".metadata").read_bytes()
    (directory / CHECKSUMS).unlink()  # a forger would correct it
    for how, content in hostile_lists(marker, good).items():
        (directory / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata: it is a pickle that names \w+\.") as refused:
            read(directory)
        assert not isinstance(refused.value, DamagedCheckpointError), how
        assert "\n" not in str(refused.value) and not marker.exists(), how


def test_an_entry_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    directory = write(tmp_path / "object", Runs(marker))  # with its right checksum
    with pytest.raises(CheckpointError, match=r"common_state.* is a pickle that names posix\.mkdir"):
        read(directory)
    directory = write(tmp_path / "tensor")
    listed = pickle.loads((directory / ".metadata").read_bytes())
    index, entry = next((i, p) for i, p in listed.storage_data.items() if i.fqn == "small")
    content, code = bytearray((directory / entry.relative_path).read_bytes()), saved(Runs(marker)).getvalue()
    listed.storage_data[index] = _StorageInfo(entry.relative_path, len(content), len(code))
    (directory / entry.relative_path).write_bytes(content + code)
    (directory / ".metadata").write_bytes(pickle.dumps(listed))
    (directory / CHECKSUMS).unlink()
    with pytest.raises(CheckpointError, match=r"distcp: small is a pickle that names posix\.mkdir"):
        read(directory)
    state = torch.frombuffer(bytearray(pickle.dumps(Runs(marker))), dtype=torch.uint8)
    from megatron_gvpo.megatron.checkpoint.storage import plain_values

    with pytest.raises(CheckpointError, match=r"_extra_state.* is a pickle that names posix\.mkdir"):
        plain_values(saved(state).getvalue(), "decoder.linear_qkv._extra_state/shard_0_4")
    assert not marker.exists()


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    directory, marker = write(tmp_path / "checkpoint"), tmp_path / "ran"
    (directory / "common.pt").write_bytes(pickle.dumps(Runs(marker)))
    with pytest.raises(CheckpointError, match=r"common\.pt: no checkpoint of this program has this file"):
        read(directory)
    (directory / "common.pt").unlink()
    (directory / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="sharded_backend='zarr'"):
        read(directory)
    assert not marker.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: setattr(entry, "relative_path", "../whole/__0_0.distcp"),
        lambda entry: setattr(entry, "relative_path", "/etc/passwd"),
        lambda entry: setattr(entry, "relative_path", b"__0_0.distcp"),
        lambda entry: setattr(entry, "offset", -1),
        lambda entry: setattr(entry, "length", 2.5),
        lambda entry: setattr(entry, "length", True),
        lambda entry: setattr(entry, "offset", 1 << 62),
        lambda entry: setattr(entry, "length", 1 << 62),
        lambda entry: setattr(entry, "transform_descriptors", ["stream.zstd"]),
        lambda entry: entry.__dict__.clear(),
    ],
)
def test_places_that_cannot_be(tmp_path: Path, change: Callable[[_StorageInfo], object]) -> None:
    directory = write(tmp_path / "whole")
    shutil.copytree(directory, tmp_path / "other")
    directory = tmp_path / "other"
    (directory / CHECKSUMS).unlink()
    listed = pickle.loads((directory / ".metadata").read_bytes())
    change(next(entry for index, entry in listed.storage_data.items() if index.fqn == "small"))
    (directory / ".metadata").write_bytes(pickle.dumps(listed))
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata|distcp") as refused:
        read(directory)
    assert "\n" not in str(refused.value)


def test_the_checksums_name_every_entry(tmp_path: Path) -> None:
    checksums = json.loads((write(tmp_path) / CHECKSUMS).read_text())
    assert checksums["algorithm"] == "xxh3_64"
    assert {name: len(entries) for name, entries in checksums["entries"].items()} == {
        "__0_0.distcp": 3,
        ".metadata": 1,
    }
