"""Conversations of the policy with environments and tools."""

from megatron_gvpo.workers.environment import Environment, Outage, Reply

__all__ = ["Environment", "Outage", "Reply"]
