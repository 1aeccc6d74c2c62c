"""Users' code in processes that can be killed: rewards, environments, tools and agent programs."""
