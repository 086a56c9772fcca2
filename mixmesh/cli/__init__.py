"""The commands, one file each. They import torch only when they need it."""
