"""The command `moe-serve launch`."""
