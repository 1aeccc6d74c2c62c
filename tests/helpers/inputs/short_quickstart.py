"""Overrides with which the quickstart's two training commands take two steps."""

SHORT = ("train.steps=2", "train.prompts_per_step=8", "optimizer.warmup_steps=0", "eval.n=1", "eval.k=[1]")
