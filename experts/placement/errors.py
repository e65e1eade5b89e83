"""What is wrong with a placement that somebody wrote or asked for."""

from __future__ import annotations


class PlacementError(ValueError):
    """One sentence with the numbers that disagree."""


class NotAPlanError(PlacementError):
    """What was read is no plan at all, so nothing can be said of how it fits."""
