"""Rollouts by agent programs of the user's, which ask the policy over an OpenAI-compatible endpoint."""

from megatron_gvpo.conversations.programs.program import Endpoint

__all__ = ["Endpoint"]
