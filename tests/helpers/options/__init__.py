"""Finds options that a run accepts and that change nothing."""
