"""Measures the whole engine on a GPU: random models, entrants, limits and the report."""
