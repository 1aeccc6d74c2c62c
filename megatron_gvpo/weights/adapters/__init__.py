"""Pushes of adapters alone: the servers keep the base's weights, and get an adapter for each version."""
