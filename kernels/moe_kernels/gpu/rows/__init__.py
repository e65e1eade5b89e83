"""Norms and additions row by row on a GPU."""
