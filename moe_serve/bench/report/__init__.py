"""Writes the figures of a run as a table, a page or a file."""
