"""Layer 3: executing a program, in one process (``interpret``) or on torch.distributed."""
