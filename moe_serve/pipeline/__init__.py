"""Runs one step through the layers: micro-batches, dispatch to the expert stage, and back."""
