"""megatron_gvpo: Megatron-backed RL post-training with GVPO, GPG and their relatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Config", "Trainer", "__version__", "load_config"]

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config, load_config
    from megatron_gvpo.training.trainer import Trainer


def __getattr__(name: str) -> Any:
    """Import the heavy parts when they are first used, so that `import megatron_gvpo` is cheap."""
    if name in ("Config", "load_config"):
        from megatron_gvpo import settings

        return getattr(settings, name)
    if name == "Trainer":
        from megatron_gvpo.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'megatron_gvpo' has no attribute {name!r}")
