"""Turns logits into tokens on a GPU."""
