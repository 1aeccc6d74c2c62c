"""Parts of weight_sync.py: models, receivers, ranks and servers."""
