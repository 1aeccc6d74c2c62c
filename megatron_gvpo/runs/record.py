"""The record of a run in its output directory: `config.yaml` and `run.json`, compared when it is resumed.

config.yaml is the whole configuration, without secrets; `megatron-gvpo train` takes it. run.json has the same
configuration, to compare with an edited config.yaml, the fingerprints of the files that the run reads, every
start of the run (when, where, by which command, with which versions), and the names in the output directory
that the run writes to, which `--overwrite` may remove.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_gvpo.core.commit import Commit, checked_out
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import check_regular, read_json_object
from megatron_gvpo.core.named_file import begins_with
from megatron_gvpo.core.redaction import REDACTED, hide
from megatron_gvpo.core.secrets import as_written
from megatron_gvpo.core.user_functions import named_files
from megatron_gvpo.core.user_imports import imported_files
from megatron_gvpo.core.versions import COMPONENTS, VERSION, own_commit
from megatron_gvpo.runs.settings_diff import Change, changes, is_allowed, known_keys, listed
from megatron_gvpo.runs.written import CONFIG, HEADER, RUN, names_written_by, recorded_names
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.reward_servers import key_of

if TYPE_CHECKING:
    from megatron_gvpo.settings.sections import BestConfig, EarlyStopConfig


def check_unchanged(config: Config, allowed: Sequence[str]) -> list[Change]:
    """Compare with the record in the output directory; returns the changes that are allowed.

    Raises ConfigError, which names key, old and new value and the option that allows it, for a change of the
    mathematics that `allowed` does not name; for a name in `allowed` that is not a key; and for half a
    record. A run without a record, from an earlier version of the program, is not compared.
    """
    directory = Path(config.output_dir)
    _check_whole(directory)
    settings: dict[str, Any] = {}
    differences, edited = [], ""
    if (directory / CONFIG).exists():
        settings, is_edited = _read_config(directory)
        differences = changes(settings, config)
        edited = f" as {RUN} has them ({CONFIG} differs: it was edited, or one is another run's)" * is_edited
    differences += changed_files(directory, config)
    # An option that the user removed is a key of the run's settings only.
    if unknown := set(allowed) - {*known_keys(as_written(config)), *known_keys(settings)}:
        raise ConfigError(f"--allow-change {sorted(unknown)[0]}: the configuration has no such key")
    refused = [
        change
        for change in differences  # a secret that was removed from the record must be given in another way
        if change.fixed and change.old != REDACTED and not is_allowed(change.key, allowed)
    ]
    if refused:
        options = " ".join(f"--allow-change {change.key}" for change in refused)
        raise ConfigError(
            f"output_dir={directory}: the run there was trained otherwise: {listed(refused)}. Resume with "
            f"the settings in {directory / CONFIG}{edited}, or say that this is meant: {options}"
        )
    return differences


def _check_whole(directory: Path) -> None:
    """Raises ConfigError if one of the record's two files is missing, because nothing would be compared."""
    config, run = directory / CONFIG, directory / RUN
    existing, gone = (run, config) if run.exists() else (config, run)
    if not gone.exists() and (existing == run or begins_with(config, HEADER)):
        raise ConfigError(
            f"{gone} is missing, with which settings and data are compared: put it back, or move {existing} "
            "away, too, to go on without a comparison"
        )


def first_start(directory: str) -> datetime | None:
    """The time of the first start of the run in a directory; None without a record."""
    starts = _read_run(Path(directory))["starts"]
    return datetime.fromisoformat(starts[0]["time"]) if starts else None


def write_record(config: Config, step: int, world_size: int, run: str | None = None) -> list[str]:
    """Write config.yaml, and add this start, from `step`, to run.json.

    `run`: the id in the checkpoint that is continued, for a run.json that has none. Returns the packages
    whose versions are not those of the start before, as `torch was 2.12 and is 2.13`.
    """
    directory, earlier = Path(config.output_dir), _read_run(Path(config.output_dir))
    start = _start(step, world_size)
    starts = [*earlier["starts"], start]
    if len(starts) > 1 and _trains_otherwise(earlier.get("config"), config):
        starts[-2] = {**starts[-2], "config": earlier["config"]}  # the settings of the starts up to this one
    writes = sorted(names_written_by(config) | recorded_names(directory))
    identity = earlier.get("id") or run or secrets.token_hex(8)  # the run's checkpoints have the same id
    settings = yaml.safe_dump(as_written(config), sort_keys=False)
    record = {"id": identity, "files": fingerprints(config), "starts": starts, "writes": writes}
    record["config"] = settings
    write_complete(directory / CONFIG, HEADER + settings)
    write_complete(directory / RUN, json.dumps(record, indent=2) + "\n")
    before = starts[-2]["versions"] if len(starts) > 1 else start["versions"]
    return [
        f"{name} was {before.get(name)} and is {version}"
        for name, version in start["versions"].items()
        if before.get(name) != version
    ]


def _trains_otherwise(earlier: str | None, config: Config) -> bool:
    """True if steps that ran under the earlier settings cannot be computed again with `config`."""
    differences = [] if earlier is None else changes(yaml.safe_load(earlier), config)
    return any(change.fixed or change.key == "train.steps" for change in differences)


def settings_of(directory: Path, step: int) -> tuple[str | None, int]:
    """The settings under which a step ran, as YAML, and the step after which a run of them began.

    None: those of config.yaml. All later steps up to this one ran under the same settings.
    """
    starts = _read_run(directory)["starts"]
    own = max((i for i, start in enumerate(starts) if start["from_step"] < step), default=0)
    ends = [i for i, start in enumerate(starts) if "config" in start]
    last = next((i for i in ends if i >= own), None)
    first = max((i + 1 for i in ends if i < own), default=0)
    since = min((start["from_step"] for start in starts[first : own + 1]), default=0)
    return None if last is None else starts[last]["config"], since


def fingerprints(config: Config) -> dict[str, dict[str, Any]]:
    """Size and hash of files that the run reads, by keys: data, reward models, teachers, the user's files.

    The user's files are those of functions, and those that options of functions and arguments of MCP servers
    name. A file that a user's file imports has `KEY:PATH`, its path from there. A hub data set has no
    fingerprint.
    """
    named = {"data.train.path": config.data.train.path}
    if config.data.eval is not None:
        named["data.eval.path"] = config.data.eval.path
    for i, component in enumerate(config.rewards.components):
        if component.served is not None and component.served.path is not None:
            named[f"{key_of(i, component.served)}.path"] = component.served.path
    if config.teacher is not None:
        named["teacher.path"] = config.teacher.path
    named |= dict(_argument_files(as_written(config)))
    code: dict[str, dict[Path, None]] = {}
    for key, source in named_files(as_written(config)):
        code.setdefault(key, {}).update(dict.fromkeys((Path(source), *imported_files(Path(source)))))
    for key, (first, *others) in code.items():
        named[key], beside = str(first), first.absolute().parent
        named |= {f"{key}:{os.path.relpath(file, beside)}": str(file) for file in others}
    prints = {key: fingerprint(Path(path)) for key, path in named.items()}
    return {key: value for key, value in prints.items() if value is not None}


def _argument_files(values: Any, at: str = "", is_argument: bool = False) -> Iterator[tuple[str, str]]:
    """The files that `options` of users' functions and arguments of an MCP server's `command` name, by keys.

    The program that a command starts is left out: an update of the system's interpreter does not change the
    run.
    """
    if isinstance(values, str) and is_argument and os.path.isfile(values):
        yield at, values
    elif isinstance(values, Mapping | list | tuple):
        for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            below = f"{at}.{key}" if at else str(key)
            is_below = is_argument or key in ("options", "command")
            if not below.endswith(".command.0"):
                yield from _argument_files(value, below, is_below)


def changed_files(directory: Path, config: Config) -> Iterator[Change]:
    """The files that the run in a directory has read, and that have changed since."""
    return _changed(_read_run(directory)["files"], fingerprints(config))


def _changed(earlier: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[Change]:
    """The files that differ in two results of `fingerprints`."""
    for key, now in present.items():
        before = earlier.get(key)
        if before is not None and (before["sha256"], before["bytes"]) != (now["sha256"], now["bytes"]):
            setting, _, imported = key.partition(":")
            file = imported and f"{imported}: "
            old, new = (
                f"{file}{value['bytes']} bytes, sha256 {value['sha256'][:8]}" for value in (before, now)
            )
            yield Change(setting, old, new, fixed=not key.startswith("data.eval."))


def _start(step: int, world_size: int) -> dict[str, Any]:
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "from_step": step,
        "host": platform.node(),
        "pid": os.getpid(),
        "world_size": world_size,
        "command": hide(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "directory": str(Path.cwd()),
        "versions": dict(_versions()),
        "git": {"directory": _fields(checked_out(Path.cwd())), "megatron_gvpo": _fields(own_commit())},
    }


def _fields(commit: Commit | None) -> dict[str, Any] | None:
    return None if commit is None else asdict(commit)


def _versions() -> Iterator[tuple[str, str]]:
    """The versions of this package, Python and the packages that it builds on, where they are installed."""
    yield "megatron_gvpo", VERSION
    yield "python", platform.python_version()
    for component in COMPONENTS:
        try:
            yield component.name, metadata.version(component.name)
        except metadata.PackageNotFoundError:
            continue


def _read_config(directory: Path) -> tuple[dict[str, Any], bool]:
    """The configuration of the run in a directory, and True if config.yaml was edited since."""
    file = directory / CONFIG
    try:
        check_regular(file)
        text = file.read_text()
        values = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{file}: cannot be read as the configuration of the run there: {problem}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: this is not the configuration of the run there")
    recorded = _read_run(directory).get("config")  # missing from records of earlier versions
    if not isinstance(recorded, str) or text == HEADER + recorded:
        return values, False
    written = yaml.safe_load(recorded)
    return written, written != values


def _read_run(directory: Path) -> dict[str, Any]:
    """The content of run.json, checked; empty if there is none."""
    file = directory / RUN
    if not file.exists():
        return {"files": {}, "starts": []}
    record = read_json_object(file)
    try:
        for value in record["files"].values():
            _ = value["bytes"], value["sha256"][:8]
        for start in record["starts"]:
            start["versions"].get("")
            datetime.fromisoformat(start["time"])
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ConfigError(f"{file}: this is not the record of the run there") from None
    return record


def write_complete(file: Path, text: str) -> None:
    """Replace a file as a whole, so that a full disk or a kill leaves the old one."""
    aside = file.with_name(file.name + ".tmp")
    with aside.open("w") as content:
        content.write(text)
        content.flush()
        os.fsync(content.fileno())
    os.replace(aside, file)


# The best checkpoint of a run so far, by a metric, and the evaluations since the metric last improved.


class Best:
    """The step with the best value of the metric among those that were offered; none without settings."""

    def __init__(self, settings: BestConfig | None) -> None:
        self._settings = settings
        self.step: int | None = None
        self._value = math.nan

    def offer(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True if this step, which has a checkpoint, is the best so far.

        If values are equal, the first is the best.
        """
        if self._settings is None:
            return False
        value = metrics.get(self._settings.metric, math.nan)
        if math.isnan(value):
            return False
        sign = 1 if self._settings.order == "highest" else -1
        if self.step is not None and sign * value <= sign * self._value:
            return False
        self.step, self._value = step, value
        return True

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        if self._settings is None or self.step is None:
            return {}
        return {"by": self._settings.model_dump(), "step": self.step, "value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, unless it is of another metric."""
        if self._settings is not None and state.get("by") == self._settings.model_dump():
            self.step, self._value = state["step"], state["value"]


# The sections that decide the values of metrics.
_MEASURES = ("data", "rewards", "eval", "rollout.conversation")


def measurement(config: Config) -> dict[str, Any]:
    """The settings and files that decide the values of metrics, for a checkpoint; {} without a best one."""
    if config.checkpoint.keep_best is None:
        return {}
    written, prints = as_written(config), fingerprints(config)
    settings = {name: written[name] for name in ("data", "rewards", "eval")}
    settings["rollout"] = {"conversation": written["rollout"]["conversation"]}
    return {"settings": settings, "files": {key: prints[key] for key in prints if is_allowed(key, _MEASURES)}}


def measured_otherwise(
    metric: str, before: Mapping[str, Any], config: Config, files: Mapping[str, Any]
) -> list[Change]:
    """The changes since an earlier `measurement` after which the metric's values do not compare.

    `files`: those of the present one.
    """
    evaluation, ignored = ("eval", "data.eval"), ["eval.every", "eval.k", "data.train", "data.shuffle"]
    if not metric.startswith("eval/"):
        ignored = [*evaluation]
    elsewhere = ["data.eval.path"] if "data.eval.path" in before["files"].keys() & files.keys() else []
    settings = [
        change
        for change in changes(before["settings"], config)
        if is_allowed(change.key, _MEASURES)
        and (change.fixed or is_allowed(change.key, evaluation))
        and change.key not in elsewhere  # the content is compared, not the path
    ]
    differences = [*settings, *_changed(before["files"], files)]
    return [change for change in differences if not is_allowed(change.key, ignored)]


# Files up to this many bytes are hashed completely; of longer ones, 256 pieces of 1 MiB are hashed.
_LARGEST_COMPLETE = 256 << 20


def fingerprint(path: Path, patterns: Sequence[str] = ("*",)) -> dict[str, Any] | None:
    """Return {"bytes", "sha256"} of a file, or of the files in a directory whose names match `patterns`.

    None if a file cannot be read.
    """
    files = [path]
    if path.is_dir():
        matching = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
        files = sorted(matching)
    digest, size = hashlib.sha256(), 0
    try:
        for file in files:
            if path.is_dir():
                digest.update(file.name.encode())
            size += _hash(file, digest)
    except OSError:  # a hub data set, or a missing file: an error names it when the data are loaded
        return None
    return {"bytes": size, "sha256": digest.hexdigest()}


def _hash(file: Path, digest: Any) -> int:
    with file.open("rb") as content:
        size = os.fstat(content.fileno()).st_size
        if size <= _LARGEST_COMPLETE:
            while block := content.read(1 << 20):
                digest.update(block)
        else:
            for i in range(256):
                content.seek(i * (size - (1 << 20)) // 255)
                digest.update(content.read(1 << 20))
    return size


class EarlyStop:
    """Counts evaluations in which the metric of `checkpoint.keep_best` did not improve."""

    def __init__(self, settings: EarlyStopConfig | None, best: BestConfig | None) -> None:
        self._settings, self._best = settings, best
        self._value, self._step, self._evaluations = math.nan, 0, 0

    def offer(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; those without the metric do not count."""
        if self._settings is None or self._best is None:
            return
        value = metrics.get(self._best.metric, math.nan)
        if math.isnan(value):
            return
        sign = 1 if self._best.order == "highest" else -1
        is_first = math.isnan(self._value)
        if is_first or sign * (value - self._value) > self._settings.min_delta:
            self._value, self._step, self._evaluations = value, step, 0
        else:
            self._evaluations += 1

    @property
    def reason(self) -> str | None:
        """The reason why the run ends; None if it continues."""
        if self._settings is None or self._best is None or self._evaluations < self._settings.patience:
            return None
        verb, than = ("risen", "above") if self._best.order == "highest" else ("fallen", "below")
        by = f" by more than {self._settings.min_delta:g}" if self._settings.min_delta else ""
        return (
            f"{self._best.metric} has not {verb}{by} {than} {self._value:.4g}, its value after step "
            f"{self._step}, in {self._evaluations} evaluation{'s' * (self._evaluations > 1)} "
            f"(train.stop_early.patience={self._settings.patience})"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        if self._best is None or math.isnan(self._value):
            return {}
        state = {"value": self._value, "step": self._step, "evaluations": self._evaluations}
        return {"by": self._best.model_dump(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, unless it is of another metric."""
        if self._best is not None and state.get("by") == self._best.model_dump():
            self._value, self._step = state["value"], state["step"]
            self._evaluations = state["evaluations"]
