"""The places that get a run's metrics and samples: metrics.jsonl, TensorBoard, and tracking services."""
