"""Drives the steps of an engine whose stages run on ranks."""
