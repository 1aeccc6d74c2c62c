"""Which prompts are sampled, and which groups make a batch."""
