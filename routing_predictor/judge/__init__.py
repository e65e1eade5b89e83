"""Judges predictors beside simple rivals."""
