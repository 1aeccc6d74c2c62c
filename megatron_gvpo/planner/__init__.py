"""Predicts memory and step time of every legal parallel layout on a cluster that need not exist yet.

The planner is pure Python and computes from published numbers, so every result is a prediction.
docs/explanation/planner.md reports how accurate the predictions are.
"""
