"""Plain torch: the meaning of each op, the CPU backend, and right on CUDA tensors."""
