"""Trains and judges the drafting head of a model: a small network that guesses the next tokens."""
