"""The head: log-probs and their gradient from hidden states, without logits; for CPU and GPU."""
