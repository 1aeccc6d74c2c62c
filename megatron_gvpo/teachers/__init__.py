"""The model that the policy learns from: its log-probs of the policy's own responses."""
