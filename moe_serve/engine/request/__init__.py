"""Requests, their sequences and parameters, and the engine's statistics."""
