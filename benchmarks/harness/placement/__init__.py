"""Parts of `benchmarks/placement.py`."""
