"""Records become prompts, token ids and images."""
