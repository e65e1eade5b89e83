"""Errors about a placement that a user wrote or asked for."""

from __future__ import annotations


class PlacementError(ValueError):
    """A placement or placement problem is invalid. The message is one sentence with the numbers
    that disagree."""


class NotAPlanError(PlacementError):
    """The content that was read is not a placement at all, so its numbers cannot be checked."""


class PlacementInputError(PlacementError):
    """A file or an option that a problem is made from is wrong."""
