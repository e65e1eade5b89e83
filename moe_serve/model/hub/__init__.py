"""Fetches models by name from a hub into the shared cache, and reads what the cache holds."""
