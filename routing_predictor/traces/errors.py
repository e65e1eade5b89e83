"""What callers may catch."""

from __future__ import annotations


class RoutingError(ValueError):
    """Somebody's mistake: one sentence, with the numbers."""


class TraceError(RoutingError):
    """A trace, or a file of one, does not hold what it should."""


class PredictorError(RoutingError):
    """A predictor's file is damaged, or is for another model or placement."""
