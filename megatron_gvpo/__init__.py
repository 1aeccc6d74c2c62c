"""megatron_gvpo: Megatron-backed RL post-training with GVPO, GPG and their relatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Config", "Trainer", "__version__", "load_config"]

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config, load_config
    from megatron_gvpo.training.trainer import Trainer

    __version__: str


def __getattr__(name: str) -> Any:
    """Import the parts when they are first used, so that `import megatron_gvpo` is cheap."""
    if name == "__version__":
        from megatron_gvpo.core.versions import VERSION

        return VERSION
    if name in ("Config", "load_config"):
        from megatron_gvpo import settings

        return getattr(settings, name)
    if name == "Trainer":
        from megatron_gvpo.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'megatron_gvpo' has no attribute {name!r}")
