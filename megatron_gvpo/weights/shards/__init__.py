"""A sharded push: the plan, and the ranks that send their parts."""
