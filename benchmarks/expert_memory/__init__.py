"""Measures partial expert memory, the choice among replicas, and experts moved under load."""
