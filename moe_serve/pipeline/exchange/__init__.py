"""Exchanges rows and partial sums between attention and expert ranks."""
