"""A configuration without any error, for tests that change something in it (the fixture `good`)."""

GOOD = """
output_dir: runs/x
model: {path: model}
data:
  train: {path: train.jsonl}
train: {steps: 20, prompts_per_step: 4, mini_batches: 2}
optimizer: {lr: 1e-5}
"""
