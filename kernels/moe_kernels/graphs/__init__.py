"""Recorders of steps that are replayed as graphs."""
