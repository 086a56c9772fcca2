"""Runs a program: in one process (``interpret``), or on torch.distributed."""
