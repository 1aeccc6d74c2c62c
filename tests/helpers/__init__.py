"""Modules that several tests share: inputs, references, servers, workers of ranks, and plugins of pytest."""
