"""Predicts the costs of a step, and chooses the number of micro-batches."""
