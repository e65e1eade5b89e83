"""Predicts what a step costs, and chooses the number of micro-batches."""
