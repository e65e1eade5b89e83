"""Decode steps captured as graphs."""
