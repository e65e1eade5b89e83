"""Judges a placement: its balance, its bound, its fan-out and the moves that lead to it."""
