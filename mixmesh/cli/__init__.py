"""The commands, one file each. None of them imports torch before it needs it."""
