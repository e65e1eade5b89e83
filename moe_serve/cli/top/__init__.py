"""The command `moe-serve top`."""
