"""Corrections for the policy that sampled, a block each."""
