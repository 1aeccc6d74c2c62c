"""From prompts to scored groups: engines, samplers and the batches that they fill."""
