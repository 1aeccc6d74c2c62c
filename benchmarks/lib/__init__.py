"""Modules that the programs in benchmarks/ import or start."""
