"""The choice of the prompts to sample, and of the groups that make a batch."""
