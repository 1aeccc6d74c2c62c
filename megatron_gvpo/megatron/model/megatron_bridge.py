"""Opens Megatron-Bridge, which converts between Hugging Face checkpoints and megatron-core models."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.lazy_imports import heavy_imports
from megatron_gvpo.core.versions import REFERENCE
from megatron_gvpo.huggingface.architectures import add_model_types
from megatron_gvpo.megatron.model.settings import DTYPES
from megatron_gvpo.settings.sections import ModelConfig

LOCKS = "MEGATRON_CONFIG_LOCK_DIR"  # Megatron-Bridge's variable


@contextlib.contextmanager
def _keep_root_logger() -> Iterator[None]:
    """Restore the root logger after the import of Megatron-Bridge.

    Megatron-Bridge (0.6.2) imports megatron.training, which sends all log records from INFO on to the stdout
    of that moment. Otherwise this program's warnings would be lost.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def _lock_of_its_own() -> Iterator[None]:
    """Give Megatron-Bridge a lock that no other process waits for, unless the user has named a directory.

    Megatron-Bridge (0.6.2) locks a file in the home directory while it reads config.json, and gives up after
    60 s without the lock. The home directory may be read-only, or shared by all ranks of a large job.
    """
    if LOCKS in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        os.environ[LOCKS] = directory
        try:
            yield
        finally:
            del os.environ[LOCKS]


def open_bridge(model: ModelConfig, key: str = "model.path") -> Any:
    """Return Megatron-Bridge's AutoBridge for a Hugging Face directory.

    `key`: the user's key or option for the directory. Raises ConfigError, ImportError.
    """
    try:
        with _keep_root_logger(), heavy_imports():
            if torch.cuda.is_available():
                import megatron.bridge as bridge
            else:
                from megatron_gvpo.megatron.cpu.bridge import import_bridge

                bridge = import_bridge()
    except ImportError as error:
        raise ImportError(
            f"Megatron-Bridge cannot be imported ({error}). Install it with "
            f"`pip install --no-deps megatron-bridge=={REFERENCE['megatron-bridge']}`; its declared "
            "dependencies conflict with transformers 5, and the rest of them is not needed"
        ) from error
    # Megatron-Bridge looks for a model by the name of the checkpoint's own Python class (auto_map), which it
    # knows for some models only. That class is never used here, and has the architecture's name
    # (`check_trainable`).
    auto_bridge = importlib.import_module("megatron.bridge.models.conversion.auto_bridge")
    auto_bridge.get_causal_lm_class_name_via_auto_map = lambda config: None  # type: ignore[attr-defined]
    os.environ.setdefault("HF_HUB_OFFLINE", "1" if os.path.isdir(model.path) else "0")
    add_model_types()
    try:
        # All supported models are transformers' own, so no code of the checkpoint is needed here.
        with _lock_of_its_own():
            return bridge.AutoBridge.from_hf_pretrained(
                model.path, dtype=DTYPES[model.dtype], trust_remote_code=False
            )
    except Exception as error:  # values of config.json that contradict each other cause errors of any type
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        raise ConfigError(f"{key}={model.path}: Megatron-Bridge cannot build this model: {problem}") from None
