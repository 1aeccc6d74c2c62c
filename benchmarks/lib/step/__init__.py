"""Parts of step_vs_trl.py: the task and the two sides."""
