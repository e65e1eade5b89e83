"""Trains predictors: from texts to captured routing to a trained file."""
