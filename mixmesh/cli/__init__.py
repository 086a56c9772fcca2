"""The commands, one file each. Nothing here imports torch before a command needs it."""
