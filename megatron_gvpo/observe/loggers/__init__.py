"""Backends for a run's metrics and samples: metrics.jsonl, TensorBoard, and tracking services."""
