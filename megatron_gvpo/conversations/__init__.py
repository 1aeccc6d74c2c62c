"""Conversations of the policy with environments, tools and agent programs."""

from megatron_gvpo.workers.environment import Environment, Outage, Reply

__all__ = ["Environment", "Outage", "Reply"]
