"""Measures what grammars cost: their compilation, their masks, and hostile ones."""
