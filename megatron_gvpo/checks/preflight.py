"""All checks before anything heavy is loaded: configuration, config.json, data, disk and GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megatron_gvpo.checks.files import check_data_files, check_output_dir
from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.checks.teacher import check_teacher
from megatron_gvpo.checks.user_source import check_source, check_tool
from megatron_gvpo.core.environment import check_rank_variables, is_first_process
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.gpu_packages import check_delta_nets, check_gpu_packages, check_no_null_cuda
from megatron_gvpo.core.gpus import LocalGpu, list_gpus
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.core.user_imports import check_helpers, helpers
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.megatron.model.attention_kernel import (
    Attention,
    check_attention,
    check_shared_prompts,
    has_flash_attention,
)
from megatron_gvpo.observe.loggers.services import SERVICES, WANDB_MODES, wandb_is_ready, wandb_mode
from megatron_gvpo.runs.existing_run import Earlier, check_earlier_run, newest_step
from megatron_gvpo.runs.lock import check_unlocked
from megatron_gvpo.runs.record import check_unchanged
from megatron_gvpo.servers.cpu_engines import check_rollout_model
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.conversation import PYTHON
from megatron_gvpo.settings.reward_servers import JudgeConfig, RewardModelConfig, key_of
from megatron_gvpo.settings.rewards import BUILT_IN
from megatron_gvpo.workers.environment import check_environment
from megatron_gvpo.workers.programs import check_program
from megatron_gvpo.workers.rewards import check_reward
from megatron_gvpo.workers.sandbox import Sandbox

_QUACK_COLUMNS = 64  # STEP of kernels/quack_tiles.py, which loads torch
_ENVIRONMENT = "name the one of the engine's own environment (docs/howto/rollout_servers.md)"
Command = Literal["train", "eval", "named eval", "export", "slurm"]


def preflight(
    config: Config,
    command: Command,
    world_size: int,
    *,
    earlier: Earlier | None = None,
    allowed: Sequence[str] = (),
) -> ModelCards:
    """Raise ConfigError if `command` cannot run with this configuration in `world_size` processes.

    Returns the cards of the run's models, which it has read.

    The command line calls it before it loads torch; `Trainer`, `evaluate`, `checkpoint_to_hugging_face` call
    it for Python users, and `slurm` before the job waits in a queue. With `slurm` the checks are those of a
    job that trains, on `world_size` ranks of other machines.

    `earlier`: how `train` or `slurm` treats an earlier run in the output directory; None does not look.
    `allowed`: the keys that change the mathematics and may differ from those of the run that is resumed.
    """
    is_training = command in ("train", "slurm")
    check_no_null_cuda()
    cards = check_layout(config, world_size)
    if command != "slurm" and torch_gpus():  # a job's nodes have other GPUs
        check_gpu_packages()
        if cards.policy.has_delta_nets:
            check_delta_nets(f"model.path={config.model.path}")
    if command in ("train", "eval", "named eval"):
        _check_attention(config, cards, is_training)
    if is_training:
        _check_training(config, cards, command, earlier, allowed)
    if command == "train":  # a job's nodes, or its container, may have packages that this machine lacks
        _check_loggers(config)
    if command != "export":
        _check_converters(config)
    if command in ("train", "eval", "slurm"):
        check_data_files(config, command)
    if command == "eval" and config.data.eval is None:
        raise ConfigError("data.eval is missing: it names the held-out prompts")
    if command == "eval" or (is_training and config.samples_responses):
        _check_rewards(config, cards)
    is_sampling = command in ("eval", "named eval") or (command == "train" and config.samples_responses)
    if is_sampling:
        if command != "named eval":  # a named evaluation has neither environment nor tools
            _check_tools(config)
        if not torch_gpus():
            check_rollout_model(config.model, config.rollout, cards)
    return cards


def _check_training(
    config: Config, cards: ModelCards, command: Command, earlier: Earlier | None, allowed: Sequence[str]
) -> None:
    """Check the head, the teacher, and the output directory with an earlier run in it."""
    _check_head(config, cards, command == "train")
    check_teacher(config, cards)
    check_output_dir(config)
    if command == "train":  # a queued job may wait until the earlier run has ended
        check_unlocked(config.output_dir)
    if earlier is not None:
        check_earlier_run(config, earlier)
        if allowed and earlier in ("refuse", "overwrite"):
            raise ConfigError(f"--allow-change {allowed[0]}: nothing is compared without --resume")
        if earlier in ("resume", "auto") and newest_step(Path(config.output_dir)) is not None:
            check_unchanged(config, allowed)


def preflight_on_ranks(
    config: Config, command: Command, *, earlier: Earlier | None = None, allowed: Sequence[str] = ()
) -> None:
    """Raise ConfigError on every rank if `preflight` refuses on any rank, because one node may lack a file.

    For a Python program, in which every rank calls an entry point with the same configuration. Without a
    process group each rank raises its own error. Loads torch.
    """
    import torch.distributed as dist

    from megatron_gvpo.core.collectives import all_ranks_agree

    with all_ranks_agree(ConfigError):
        if not dist.is_initialized():
            check_rank_variables()
        preflight(config, command, int(os.environ.get("WORLD_SIZE", "1")), earlier=earlier, allowed=allowed)


def torch_gpus() -> list[LocalGpu]:
    """This machine's GPUs, if torch will use them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or version("torch").endswith("+cpu"):
        return []
    return list_gpus()


def _check_attention(config: Config, cards: ModelCards, is_training: bool) -> None:
    """The GPUs of this machine, where torch will use them, must have an attention kernel for packs.

    A run that trains needs one for each model that the trainer holds.
    """
    models, critic = {"": cards.policy}, config.algorithm.critic
    if is_training and config.teacher is not None and config.teacher.server is None:
        models[f"teacher.path={config.teacher.path}: "] = cards.teacher
    if is_training and critic is not None and critic.path is not None:
        models[f"algorithm.critic.path={critic.path}: "] = cards.critic
    attentions = {
        named: Attention.of(config.model, config.parallel, config.train.deterministic, card)
        for named, card in models.items()
    }
    for capability in {gpu.compute_capability for gpu in torch_gpus()} - {None}:
        assert capability is not None
        for named, attention in attentions.items():
            try:
                check_attention(attention, capability, has_flash_attention())
            except ConfigError as error:
                raise ConfigError(f"{named}{error}") from None
        if config.train.requires_shared_prompts:
            check_shared_prompts(attentions[""], capability)


def _check_head(config: Config, cards: ModelCards, is_here: bool) -> None:
    """Check what the head's product with QuACK needs of model and machine; `is_here`: this machine trains."""
    if config.train.head_backend != "quack":
        return
    reason = None
    vocabulary = int(cards.policy.get("vocab_size", 0))
    capabilities = sorted({gpu.compute_capability or (0, 0) for gpu in torch_gpus()})
    if config.model.dtype != "bfloat16":
        reason = f"it computes in bfloat16, and this is model.dtype={config.model.dtype}"
    elif vocabulary % _QUACK_COLUMNS:
        reason = f"it takes vocabularies that {_QUACK_COLUMNS} divides, and this is vocab_size={vocabulary}"
    elif is_here and capabilities != [(9, 0)]:
        named = ", ".join(f"{major}.{minor}" for major, minor in capabilities) or "no GPU that torch uses"
        reason = f"it needs GPUs of compute capability 9.0 (H100, H200), and this machine has {named}"
    elif is_here and find_spec("quack") is None:
        reason = "QuACK is not installed (pip install 'megatron-gvpo[quack]')"
    if reason is not None:
        raise ConfigError(f"train.head_backend=quack: {reason}; leave it out")


def check_interpreter(config: Config) -> None:
    """Raise ConfigError if `rollout.servers.python` is not an interpreter that has the engine.

    The check is made only if this process will start servers; the engine itself reports what it lacks when it
    starts.
    """
    servers, engine = config.rollout.servers, config.rollout.engine
    starts_servers = config.samples_responses and config.rollout.uses_servers and not servers.urls
    if not starts_servers or not is_first_process():
        return
    where = f"rollout.servers.python={servers.python}"
    if shutil.which(servers.python) is None:
        raise ConfigError(f"{where}: there is no such program, or it may not be run; {_ENVIRONMENT}")
    code = f"import importlib.util; raise SystemExit(3 * (importlib.util.find_spec({engine!r}) is None))"
    try:
        done = subprocess.run([servers.python, "-c", code], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{where}: it did not end in 60 s; {_ENVIRONMENT}") from None
    except OSError as error:
        raise ConfigError(f"{where}: it cannot be run: {error.strerror}; {_ENVIRONMENT}") from None
    if done.returncode == 3:
        raise ConfigError(f"{where}: it has no package {engine}; {_ENVIRONMENT}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ConfigError(f"{where}: it is not a working Python interpreter ({last[:200]}); {_ENVIRONMENT}")


def _check_converters(config: Config) -> None:
    """Files of functions that convert records must exist and be Python."""
    for part, dataset in (("train", config.data.train), ("eval", config.data.eval)):
        if dataset is None or dataset.convert is None:
            continue
        _check_source(f"data.{part}.convert", dataset.convert)


def _check_loggers(config: Config) -> None:
    for service in SERVICES:
        project = getattr(config.logging, service.key)
        if project is not None and find_spec(service.package) is None:
            raise ConfigError(
                f"logging.{service.key}={project}: {service.title} is not installed: "
                f"pip install {service.install}, or leave it out"
            )
    if config.logging.wandb_project is not None and (mode := wandb_mode()) not in WANDB_MODES:
        raise ConfigError(f"WANDB_MODE={mode}: wandb has no such mode; it has {', '.join(WANDB_MODES)}")
    if config.logging.wandb_project is not None and not wandb_is_ready():
        raise ConfigError(
            f"logging.wandb_project={config.logging.wandb_project}: this machine is not logged in to Weights "
            "& Biases: run `wandb login`, set WANDB_API_KEY, or log offline with WANDB_MODE=offline"
        )
    if config.logging.opentelemetry and find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise ConfigError(
            "logging.opentelemetry=true: its packages are not installed: "
            "pip install 'megatron-gvpo[opentelemetry]', or leave it out"
        )
    if config.logging.profiler == "nsys" and config.logging.profile_steps and not list_gpus():
        raise ConfigError(
            "logging.profiler=nsys: it records the NVIDIA GPUs of this machine, which has none; "
            "logging.profiler=torch profiles CPUs, too"
        )


def _check_rewards(config: Config, cards: ModelCards) -> None:
    """Files of rewards, environments and programs must contain the functions that the configuration names.

    The workers import the rewards' files only later.
    """
    imported: dict[str, Path] = {}  # one worker imports the files of all components
    for i, component in enumerate(config.rewards.components):
        try:
            if component.built_in:
                BUILT_IN[component.name].check()
        except ValueError as error:
            raise ConfigError(f"rewards.components.{i}.name={component.name}: {error}") from None
        if component.served is not None and component.served.path is not None:
            check_served(component.served, key_of(i, component.served), cards.component(i))
        if component.function is not None:
            check = partial(check_reward, options=component.options)
            _check_source(f"rewards.components.{i}.function", component.function, check, imported)
    talks = config.rollout.conversation
    if talks is None:
        return
    for tool in talks.tools:
        if tool != PYTHON:
            _check_tool(tool)
    if ":" in talks.parser:
        _check_source("rollout.conversation.parser", talks.parser)
    if talks.environment is not None:
        check = partial(check_environment, options=talks.options)
        _check_source("rollout.conversation.environment", talks.environment, check)
    if talks.program is not None:
        check = partial(check_program, options=talks.options)
        _check_source("rollout.conversation.program", talks.program, check)
    if talks.tools or talks.mcp:
        _check_chat_template(config)


def _check_source(
    key: str,
    spec: str,
    check: Callable[[Any], None] | None = None,
    imported: dict[str, Path] | None = None,
) -> None:
    """Raises ConfigError if the user's file lacks what `spec` names, or `check` refuses it.

    `imported`: the modules beside the files that the same worker imports before; those of this one are added.
    """
    try:
        stub = check_source(spec)
        if (source := Path(spec.rpartition(":")[0])).suffix == ".py" and imported is not None:
            check_helpers(source, imported)
            imported |= helpers(source)
        if stub is not None and check is not None:
            check(stub)
    except ValueError as error:
        raise ConfigError(f"{key}={spec}: {error}") from None


def _check_tool(spec: str) -> None:
    try:
        check_tool(spec)
    except ValueError as error:
        raise ConfigError(f"rollout.conversation.tools={spec}: {error}") from None


def _check_chat_template(config: Config) -> None:
    """Raise ConfigError for tools if the files of the model's directory lack a chat template."""
    directory = Path(config.model.path)
    needs = "rollout.conversation.tools need a chat template, which tells the policy of them"
    if not config.data.chat_template:
        raise ConfigError(f"{needs}: data.chat_template=false")
    file = directory / "tokenizer_config.json"
    in_file = file.is_file() and read_json_object(file).get("chat_template")
    others = ("chat_template.*", "additional_chat_templates", "tekken.json")
    if not in_file and not any(path for pattern in others for path in directory.glob(pattern)):
        raise ConfigError(f"{needs}: model.path={directory} has none (chat_template.jinja)")


def _check_tools(config: Config) -> None:
    """The tool `python` needs a sandbox, and MCP servers their package, on every machine that samples."""
    talks = config.rollout.conversation
    if talks is not None and talks.mcp and find_spec("mcp") is None:
        raise ConfigError(
            "rollout.conversation.mcp: the package mcp is not installed: pip install 'megatron-gvpo[mcp]'"
        )
    if talks is None or PYTHON not in talks.tools:
        return
    try:
        Sandbox(**talks.sandbox.model_dump()).check()
    except ValueError as error:
        raise ConfigError(f"rollout.conversation.tools: {PYTHON}: {error}") from None


def check_served(served: RewardModelConfig | JudgeConfig, key: str, card: ModelCard) -> None:
    """Raises ConfigError for a reward model that is not a classifier with one label."""
    if isinstance(served, JudgeConfig):
        return
    where = f"{key}.path"
    architecture = str((card.architectures or ["(not named)"])[0])
    if not architecture.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{where}={served.path}: its architecture is {architecture}, and a reward model is a "
            "...ForSequenceClassification with one label"
        )
    labels = card.get("num_labels", len(card.get("id2label") or {}) or 2)  # transformers' default is 2
    if labels != 1:
        raise ConfigError(f"{where}={served.path}: it has {labels} labels, and a reward model has one")
