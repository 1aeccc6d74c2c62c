"""Shared by several tests: inputs, references, servers, workers of ranks, and plugins of pytest."""
