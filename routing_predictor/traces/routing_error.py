"""Errors of this package that callers may catch."""

from __future__ import annotations


class RoutingError(ValueError):
    """An invalid input of the caller; the message is one sentence with the numbers."""


class TraceError(RoutingError):
    """A trace, or a trace file, has invalid content."""


class TorchFileError(TraceError):
    """A file of torch.save is damaged, or holds more than plain data."""


class PredictorError(RoutingError):
    """A predictor's file is damaged, or belongs to another model or placement."""
