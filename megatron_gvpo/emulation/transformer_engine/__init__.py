"""References in PyTorch for the functions of Transformer Engine's compiled extension."""
