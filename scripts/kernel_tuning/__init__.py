"""The search of `scripts/tune_kernels.py`: the tiles to try, and their times."""
