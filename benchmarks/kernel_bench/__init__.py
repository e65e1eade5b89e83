"""The parts of `benchmarks/kernels.py`: shapes, work, contestants, clocks and the table."""
