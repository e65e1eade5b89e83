"""Predicts the experts of a request's coming tokens."""
