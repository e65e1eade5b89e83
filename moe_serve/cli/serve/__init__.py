"""The command `moe-serve serve`."""
