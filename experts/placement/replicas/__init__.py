"""Chooses which copy of an expert serves a row."""
