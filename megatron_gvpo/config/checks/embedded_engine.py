"""Refuses models that the embedded engine cannot sample from, before anything is loaded."""

from __future__ import annotations

from typing import Any

from megatron_gvpo.config.checks.supported_models import experts
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.schema import Config

# transformers keeps the experts of this architecture as the file has them: a layer's experts in one tensor.
_WHOLE_EXPERTS = ("GptOssForCausalLM",)


def check_embedded_engine(config: Config, model: dict[str, Any]) -> None:
    """Raises ConfigError if the run would stop at its first push or at its first prompt.

    `model`: its config.json, as `read_model_config` returns it.
    """
    if not config.samples_responses or config.rollout.uses_servers:
        return
    reason = None
    if experts(model) and not any(name in _WHOLE_EXPERTS for name in model.get("architectures") or ()):
        reason = "experts, which its file has one by one"
    elif "linear_attention" in (model.get("layer_types") or ()) or "linear_num_value_heads" in model:
        reason = "layers with a gated delta net"
    if reason is not None:
        raise ConfigError(
            f"model.path={config.model.path} has {reason}, and the embedded engine cannot sample from such a "
            "model: set rollout.engine to sglang or vllm"
        )
