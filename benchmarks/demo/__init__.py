"""``make demo``: a byte-level GPT on four unequal devices, against DDP, in one run."""
