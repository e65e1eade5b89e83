"""The command `moe-serve trace`."""
