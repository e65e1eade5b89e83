"""The command `moe-serve place`."""
