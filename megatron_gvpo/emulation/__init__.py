"""An emulated GPU: the GPU's own code path with values, on a machine without a GPU."""
