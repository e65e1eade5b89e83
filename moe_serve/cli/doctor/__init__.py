"""The command `moe-serve doctor`."""
