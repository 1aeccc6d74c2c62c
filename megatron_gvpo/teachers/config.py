"""The section `teacher`: a model whose log-probs of the policy's responses the policy learns from."""

from __future__ import annotations

from megatron_gvpo.config.section import LocalPath, Section
from megatron_gvpo.rewards.served.config import RewardServers


class TeacherServers(RewardServers):
    """The servers of a teacher."""


class TeacherConfig(Section):
    """A language model with the policy's tokenizer, of any size."""

    free_keys = ("path", "trust_remote_code", "server")  # the content of `path` is compared

    # A Hugging Face checkpoint directory: config.json, weights, and the same tokenizer as model.path has.
    # Servers in `server.urls` serve the same model. Its weights and activations have the type model.dtype.
    path: LocalPath
    trust_remote_code: bool = False  # Run Python files that come with the checkpoint.
    # The teacher computes on servers of SGLang or vLLM; null: in the trainer's own processes.
    server: TeacherServers | None = None
