"""Blocks that change rewards, mask or drop responses before the estimator."""
