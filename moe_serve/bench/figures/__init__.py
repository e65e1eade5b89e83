"""Turns the records of a run into figures."""
