"""Advantages of responses or tokens, a block each."""
