"""The interface of agent programs: `run(prompt, endpoint)` gets an Endpoint.

The import of this module does not load torch.
"""

from megatron_gvpo.workers.messages import Endpoint

__all__ = ["Endpoint"]
