"""CPU forms of the operators: autograd Functions around numba kernels on the tensors' own memory, and matrix products."""
