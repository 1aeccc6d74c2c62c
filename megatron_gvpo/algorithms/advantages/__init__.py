"""Estimators of the advantages of responses or tokens; each is a block."""
