"""The search of `scripts/tune_kernels.py`: which tiles to try, and what each takes."""
