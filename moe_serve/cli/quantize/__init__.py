"""The command `moe-serve quantize`."""
