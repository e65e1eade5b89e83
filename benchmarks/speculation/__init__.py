"""Measures speculation on and off, in alternating turns of one process."""
