"""Experts whose weights are in a slower tier: which lie in memory, and which are fetched next."""
