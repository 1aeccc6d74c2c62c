"""The interface of agent programs: `run(prompt, endpoint)` gets an Endpoint. Importing it loads no torch."""

from megatron_gvpo.workers.messages import Endpoint

__all__ = ["Endpoint"]
