"""The command `moe-serve predictor`."""
