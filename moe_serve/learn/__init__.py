"""Trains routing predictors from texts: captures the routing, trains, and evaluates."""
