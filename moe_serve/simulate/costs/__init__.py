"""Predicts the seconds of simulated steps from published hardware and a model's config."""
