"""Prepares a token's queries, keys and values for attention, on a GPU."""
