"""Compares predictors with simple baselines."""
