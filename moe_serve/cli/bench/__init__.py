"""The command `moe-serve bench`."""
