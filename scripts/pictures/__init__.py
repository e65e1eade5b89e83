"""Draws the pictures of the documentation."""
