"""Rehearses a rank of a GPU run without a GPU: true sizes, the real libraries, no arithmetic."""
