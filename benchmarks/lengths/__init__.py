"""Judges predictions of answer lengths on the demonstration model's own answers."""
