"""Answers that follow a grammar: checked, compiled, and turned into masks over the vocabulary."""
