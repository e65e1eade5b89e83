"""Checks and compiles the grammars of answers, and computes their masks over the vocabulary."""
