# mypy: disable-error-code="func-returns-value"
"""Places, limits and environments that a run may find itself in."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bad_input.case import TRAIN, Case, Expected, with_line
from bad_input.contradictions import each_step_once
from bad_input.data import record

# Root reads every file, and writes every one, by these two.
WITHOUT_ROOTS_RIGHTS = " ".join(
    f"--{these}=-dac_override,-dac_read_search" for these in ("bounding-set", "inh-caps")
)
NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS
_open: list[socket.socket] = []


def case(
    name: str,
    *says: str,
    expected: Expected = "refused",
    arguments: Sequence[str] = TRAIN,
    spoil: Callable[[Path], object] = lambda _: None,
    before: Callable[[], object] = lambda: None,
    after: Callable[[Path], str] = lambda _: "",
    fresh: bool = False,
    shell: str = "",
    **environment: str | None,
) -> Case:
    return Case(
        "surroundings",
        name,
        arguments,
        spoil,
        expected,
        says,
        environment,
        before=before,
        after=after,
        fresh=fresh,
        shell=shell,
    )


def disk(options: str) -> Callable[[], None]:
    """Mounts a file system in memory at ./disk, which the command and its children alone see."""

    def before() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(NEW_NAMESPACE) == 0, os.strerror(ctypes.get_errno())
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        os.mkdir("disk")
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", "disk"], check=True)

    return before


def full(size: int, free: int) -> Callable[[], None]:
    """A disk of so many bytes, of which so many are left."""

    def before() -> None:
        disk(f"size={size}")()
        with open("disk/filled", "wb") as file:
            file.write(b"x" * (size - free))

    return before


def limited(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


def closed(*descriptors: int) -> Callable[[], object]:
    return lambda: [os.close(descriptor) for descriptor in descriptors]


def listening(port: int) -> Callable[[], None]:
    """Another program has the port."""

    def before() -> None:
        _open.append(socket.create_server(("127.0.0.1", port)))

    return before


def in_no_directory() -> None:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


def renamed(model: str, data: str) -> Callable[[Path], object]:
    return lambda t: ((t / "model").rename(t / model), (t / "data").rename(t / data))


def foreign(task: Path) -> None:
    """A prompt whose text no ASCII terminal can show, and a reward that prints it."""
    with_line(record(answer="é\u4e2d"))(task)
    body = "def reward(prompt, rollout):\n    print('é\u4e2d')\n    return len(set(rollout.token_ids)) / 10\n"
    (task / "reward.py").write_text(body)


def is_complete(task: Path) -> str:
    """Looks for the run's last step, and for text in its metrics that is none of ours."""
    return "" if (task / "run/checkpoints/step_00000001").is_dir() else "silent"


def one_of_two(task: Path) -> str:
    codes = sorted((task / "codes").read_text().split())
    return each_step_once(task) if codes == ["0", "2"] else "silent"


DISK = (*TRAIN, "output_dir=disk/run")
RACE = (
    f"for i in 1 2; do ( $PROGRAM {' '.join(TRAIN)} train.steps=3; echo $? >> codes ) & done; wait; "
    "sort -n codes | head -1 | grep -q '^0$'"
)
PIPED = "set -o pipefail; $PROGRAM {} | true; code=$?; [ $code = 141 ] && exit 0; exit $code"
C_LOCALE: dict[str, Any] = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

SURROUNDINGS = [
    case(
        "output_dir a link to a directory",
        expected="runs",
        spoil=lambda t: ((t / "there").mkdir(), (t / "run").symlink_to("there")),
        after=is_complete,
    ),
    case(
        "output_dir a link to nothing",
        "run",
        expected="either",
        spoil=lambda t: (t / "run").symlink_to("gone"),
    ),
    case("output_dir a link to itself", "run", spoil=lambda t: (t / "run").symlink_to("run")),
    case("output_dir on a disk that is read-only", "disk", before=disk("ro"), arguments=DISK),
    case("output_dir on a disk that is full", "disk", "space", before=full(1 << 20, 0), arguments=DISK),
    case(
        "output_dir on a disk that has no room for a checkpoint",
        "disk",
        "space",
        before=full(1 << 20, 200 << 10),
        arguments=DISK,
    ),
    case("output_dir on a disk without inodes", "disk", "space", before=disk("nr_inodes=4"), arguments=DISK),
    case(
        "spaces, quotes and letters of other alphabets in paths",
        expected="runs",
        spoil=renamed("мо дель", "d'a\"ta"),
        arguments=(*TRAIN, "model.path=мо дель", "data.train.path=d'a\"ta/train.jsonl", "output_dir=a run/ü"),
    ),
    case("a line feed in output_dir", expected="either", arguments=(*TRAIN, 'output_dir="run\\nx"')),
    case("64 open files", "files", before=limited(resource.RLIMIT_NOFILE, 64)),
    case("24 open files", "files", before=limited(resource.RLIMIT_NOFILE, 24)),
    case("files of 100 KB at most", "large", before=limited(resource.RLIMIT_FSIZE, 100_000)),
    case("no core files and a small stack", expected="runs", before=limited(resource.RLIMIT_STACK, 1 << 20)),
    case("HOME not set", expected="runs", fresh=True, HOME=None, after=is_complete),
    case(
        "HOME and caches that cannot be written",
        expected="runs",
        fresh=True,
        after=is_complete,
        HOME="/proc",
        XDG_CACHE_HOME="/proc/cache",
        HF_HOME="/proc/hf",
        TRITON_CACHE_DIR="/proc/triton",
        MPLCONFIGDIR="/proc/matplotlib",
    ),
    case("TMPDIR a file", expected="runs", TMPDIR="/etc/hostname", fresh=True, after=is_complete),
    case(
        "text that an ASCII terminal cannot show",
        expected="runs",
        spoil=foreign,
        fresh=True,
        after=is_complete,
        **C_LOCALE,
    ),
    case(
        "paths that an ASCII locale cannot name",
        expected="either",
        spoil=renamed("мо", "dä"),
        arguments=(*TRAIN, "model.path=мо", "data.train.path=dä/train.jsonl", "output_dir=ü"),
        fresh=True,
        **C_LOCALE,
    ),
    case("standard input closed", expected="runs", before=closed(0), fresh=True, after=is_complete),
    case("standard output closed", expected="runs", before=closed(1), fresh=True, after=is_complete),
    case("standard error closed", expected="runs", before=closed(2), fresh=True, after=is_complete),
    case("all three closed", expected="runs", before=closed(0, 1, 2), fresh=True, after=is_complete),
    *(
        case(f"{command} | true", expected="either", shell=PIPED.format(command))
        for command in ("recipes", "recipes show grpo", "--help", "runs .", "doctor")
    ),
    case("a full disk for standard output", expected="either", shell="$PROGRAM recipes > /dev/full"),
    case("CUDA_VISIBLE_DEVICES empty", expected="runs", CUDA_VISIBLE_DEVICES=""),
    case("CUDA_VISIBLE_DEVICES a word", expected="runs", CUDA_VISIBLE_DEVICES="abc"),
    case(
        "all of another job's rank variables",
        "rank",
        "RANK",
        arguments=(*TRAIN, "parallel.timeout_seconds=5"),
        RANK="0",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29719",
    ),
    case(
        "a port of another program for the ranks",
        "29718",
        before=listening(29718),
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29718",
    ),
    case(
        "variables of a Slurm job that is over",
        expected="runs",
        SLURM_JOB_ID="77",
        SLURM_PROCID="3",
        SLURM_NTASKS="8",
        SLURM_RESTART_COUNT="x",
    ),
    case("two starts at once", expected="runs", shell=RACE, after=one_of_two),
    case(
        "a directory that is gone", "output_dir", arguments=("train", "../run.yaml"), before=in_no_directory
    ),
    case(
        "recipes from a directory that is gone",
        expected="either",
        arguments=("recipes",),
        before=in_no_directory,
    ),
    case(
        "watch on a port of another program",
        "29717",
        spoil=lambda t: ((t / "run").mkdir(), (t / "run/metrics.jsonl").write_text('{"step": 1}\n')),
        arguments=("watch", "run", "--port", "29717"),
        before=listening(29717),
    ),
    case("report of nothing", "nothere", arguments=("report", "nothere")),
    case(
        "report of hostile metrics",
        expected="either",
        spoil=lambda t: (
            (t / "run").mkdir(),
            (t / "run/metrics.jsonl").write_text('{"step": 1, "</script>": 1e400, "x": "y", "z": [1]}\n'),
        ),
        arguments=("report", "run"),
    ),
    case(
        "report of metrics with a huge step",
        expected="either",
        spoil=lambda t: (
            (t / "run").mkdir(),
            (t / "run/metrics.jsonl").write_text(json.dumps({"step": 10**30, "reward/mean": 1}) + "\n"),
        ),
        arguments=("report", "run"),
    ),
    case(
        "no shared memory",
        expected="runs",
        before=lambda: (
            disk("size=1m")(),
            subprocess.run(["mount", "--bind", "disk", "/dev/shm"], check=True),
        ),
    ),
    *(
        case(
            f"{path} without permission to read it",
            says,
            shell=f"chmod 0 {path} && setpriv {WITHOUT_ROOTS_RIGHTS} $PROGRAM {' '.join(TRAIN)}",
        )
        for path, says in (
            ("model", "model/config.json"),
            ("model/config.json", "model/config.json"),
            ("data", "data/train.jsonl"),
        )
    ),
    case(
        "output_dir where this user may not write",
        "run",
        shell=f"chmod 555 . && setpriv {WITHOUT_ROOTS_RIGHTS} $PROGRAM {' '.join(TRAIN)}",
    ),
]
