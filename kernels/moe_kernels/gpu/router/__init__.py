"""Chooses the experts of each row on a GPU."""
