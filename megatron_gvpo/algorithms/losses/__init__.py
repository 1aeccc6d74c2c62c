"""The losses; each is a block."""
