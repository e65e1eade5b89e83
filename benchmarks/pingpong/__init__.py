"""Measures micro-batches and steps sent ahead on one attention rank and one expert rank."""
