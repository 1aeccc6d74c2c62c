"""Verdicts on a run before it starts: its prompts, reward, first responses, and a tiny step."""
