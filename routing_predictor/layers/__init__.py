"""Predicts the experts of the next layer."""
