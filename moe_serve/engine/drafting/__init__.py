"""Proposes the next tokens of sequences, for the model to check several of them in one step."""
