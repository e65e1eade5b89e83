"""Measures the kernels alone: shapes, work, contestants, clocks and the table."""
