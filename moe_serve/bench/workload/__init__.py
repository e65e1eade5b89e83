"""Decides which requests are sent and when."""
