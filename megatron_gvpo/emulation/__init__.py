"""An emulated GPU: the GPU's own code path with values, on the null CUDA, whose device memory is host memory."""
