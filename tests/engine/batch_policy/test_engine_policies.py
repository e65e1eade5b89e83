"""Policies in a real engine: the same tokens under all of them, and signatures that arrive."""

from __future__ import annotations
