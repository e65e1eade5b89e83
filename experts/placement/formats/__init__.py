"""Placement files of other engines, read and written by each engine's rules."""
