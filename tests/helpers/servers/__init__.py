"""Real rollout servers, stand-ins for servers, and what disturbs them."""
