"""Ranks killed at random under load: the parts of `soak.py`."""
