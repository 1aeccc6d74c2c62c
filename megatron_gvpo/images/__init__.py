"""Images of prompts: where they come from, how many tokens they take, and their pixels for the model."""
