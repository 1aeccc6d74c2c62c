"""Converts weights between a Hugging Face directory and a Megatron directory, on a GPU or CPU.

A Megatron directory is megatron-core's distributed checkpoint of the model alone. Any parallel layout can
load such a directory. The checkpoints `checkpoints/step_*` of a run can be read as Megatron directories, too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_gvpo.checks.preflight import preflight_on_ranks
from megatron_gvpo.core.errors import CheckpointError, ConfigError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.huggingface.architectures import check_trainable
from megatron_gvpo.huggingface.card import ModelCard, facts_of, first_difference
from megatron_gvpo.huggingface.tokenizer import PROCESSOR, write_companions
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.checkpoint.directory import RECORD, read_record, run_on_all_ranks, run_on_rank_0
from megatron_gvpo.megatron.checkpoint.load import check_adapters, check_model, load_newest, load_shards
from megatron_gvpo.megatron.checkpoint.save import Writer, save_shards
from megatron_gvpo.megatron.checkpoint.state import load_weights, weights_state
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.runs.existing_run import check_empty, check_outside
from megatron_gvpo.runs.written import EXPORT, keep_foreign
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig

_SOURCE_CONFIG = "source_config.json"  # in a Megatron directory: the config.json of the model it was made of
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "tekken.json"),
    *("*.model", "*.tiktoken", "*.py"),  # Kimi K2's tokenizer is a Python file, which imports another
    *("*.jinja", "chat_template.json", "generation_*"),
)


def to_megatron(source: Path, target: Path) -> None:
    """Write the weights of the Hugging Face directory `source` as a Megatron directory.

    Raises ConfigError, also where `target` is not empty, and CheckpointError.
    """
    check_empty(target, f"TARGET={target}")
    check_outside(target, f"TARGET={target}", [source])
    model = _build(source, "SOURCE")
    what = f"cannot write {target}"
    run_on_rank_0(what, lambda: target.mkdir(parents=True, exist_ok=True))
    with _emptied_on_failure(target), parallel.megatron_device():
        save_shards(what, lambda: weights_state(model), target, Writer())
        run_on_rank_0(what, lambda: shutil.copy(source / "config.json", target / _SOURCE_CONFIG))


def to_hugging_face(source: Path, target: Path, like: Path) -> None:
    """Write the weights of the Megatron directory `source` as a Hugging Face directory.

    `like`: the Hugging Face directory that the model came from, for its configuration and tokenizer.
    Raises ConfigError, also where `target` is not empty, and CheckpointError.
    """
    check_empty(target, f"TARGET={target}")
    check_outside(target, f"TARGET={target}", [source])
    _check_like(source, like)
    model = _build(like, "--like")
    if (record := source / RECORD).is_file():  # a run's checkpoint
        run_on_all_ranks("", lambda: check_model(source, read_json_object(record), model))
    _read(model, source, f"cannot read {source} as weights of {like}")

    def copy() -> None:
        for pattern in (*_TOKENIZER, *PROCESSOR):
            for file in like.glob(pattern):
                shutil.copy(file, target)

    with _emptied_on_failure(target):
        run_on_all_ranks(f"cannot write {target}", lambda: model.save_hf(target))
        run_on_rank_0(f"cannot write {target}", copy)


@contextmanager
def _emptied_on_failure(target: Path) -> Iterator[None]:
    """Remove the written files if writing fails, because a part of a model would block the next attempt."""
    try:
        yield
    except CheckpointError:
        for path in target.iterdir() if target.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        raise


def _check_like(source: Path, like: Path) -> None:
    """Raises ConfigError if `source` was converted from a model with another config.json.

    Weights of another vocabulary fit, because the rows are padded, and a value such as rope_theta has no
    weight at all.
    """
    if not (file := source / _SOURCE_CONFIG).is_file():
        return  # a run's checkpoint has no such file
    own, other = facts_of(read_json_object(file)), facts_of(ModelCard.read(like, "--like").in_file)
    if (difference := first_difference(own, other)) is not None:
        key, converted, here = difference
        raise ConfigError(
            f"--like={like}: {key}={here} in config.json, and SOURCE={source} was converted from a "
            f"model with {converted}"
        )


def checkpoint_to_hugging_face(
    config: Config, target: Path, step: int | None = None, adapter_only: bool = False
) -> int:
    """Write the weights of a run's checkpoint as a Hugging Face directory; returns its step.

    `step`: default the newest. `adapter_only`: write the adapters as Hugging Face PEFT does, without the base
    (`model.adapter` must be set). A collective. The conversion needs no data, optimizer or engine. Raises
    ConfigError for settings that `preflight` refuses, before anything is loaded, and if `target` is not
    empty; CheckpointError.
    """
    preflight_on_ranks(config, "export")
    check_empty(target, f"--out {target}")
    parallel.initialize(config.parallel, config.train.seed)
    model = build(config.model, config.parallel, trained=False)
    step = load_checkpoint(config.output_dir, model, step)
    if adapter_only:
        assert model.adapters is not None, "the command has checked it"
        _write_adapter(model, target)
    else:
        write_hugging_face(model, config.model, target, step)
    return step


def load_checkpoint(output_dir: str, model: Model, step: int | None = None) -> int:
    """Load the weights of a run's checkpoint, of `step` or else the newest that is not damaged.

    Returns its step. Raises CheckpointError. A collective.
    """
    checkpoints = Path(output_dir) / "checkpoints"

    def load(directory: Path) -> int:
        run_on_all_ranks("", lambda: _check_record(directory, model))
        _read(model, directory, f"cannot read {directory}")
        return int(directory.stem.removeprefix("step_"))

    if (loaded := load_newest(checkpoints, load, step=step)) is None:
        which = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        raise CheckpointError(f"{checkpoints}: there is {which}")
    return loaded


def _check_record(directory: Path, model: Model) -> None:
    record = read_record(directory)
    check_model(directory, record, model)
    check_adapters(directory, record, model)


def write_hugging_face(model: Model, source: ModelConfig, target: Path, step: int) -> None:
    """Write weights, configuration, tokenizer, image processor and generation_config.json. A collective.

    Adapters are merged into the weights, and written by themselves in the folder `adapter` inside. The file
    export.json tells the step (`runs.existing_run.exported_step`) and the files, which `--overwrite` may
    remove. Raises CheckpointError and then leaves `target` unchanged.
    """
    partial = target.with_name(target.name + ".partial")
    what = f"cannot write {target}"
    run_on_all_ranks(what, lambda: model.save_hf(partial))
    if model.adapters is not None:
        _write_adapter(model, partial / "adapter")

    def finish() -> None:
        write_companions(source.path, source.trust_remote_code, partial)
        files = sorted(path.relative_to(partial).as_posix() for path in partial.rglob("*") if path.is_file())
        (partial / EXPORT).write_text(json.dumps({"step": step, "files": files}) + "\n")
        keep_foreign(target, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

    run_on_rank_0(what, finish)


def _write_adapter(model: Model, target: Path) -> None:
    assert model.adapters is not None
    run_on_all_ranks(f"cannot write {target}", lambda: model.save_adapters(target))


def _read(model: Model, source: Path, problem: str) -> None:
    with parallel.megatron_device(), torch.no_grad():
        loaded = load_shards(problem, lambda: weights_state(model), source)
        run_on_all_ranks(problem, lambda: load_weights(model, loaded))


def _build(directory: Path, key: str) -> Model:
    config = ModelCard.read(str(directory), key)
    check_trainable(config, f"{key}={directory}")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stored not in ("float32", "bfloat16"):
        raise ConfigError(f"{key}={directory}: dtype={stored} in config.json; supported: float32, bfloat16")
    layout = ParallelConfig()
    parallel.initialize(layout, seed=0)
    return build(ModelConfig(path=str(directory), dtype=stored), layout, trained=False, key=key)
