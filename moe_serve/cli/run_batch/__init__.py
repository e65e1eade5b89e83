"""The command `moe-serve run-batch`."""
