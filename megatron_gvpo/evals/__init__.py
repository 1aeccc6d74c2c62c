"""Named evaluations (gsm8k, humaneval, ...): lm-eval's tasks, answered by the run's own engine."""
