"""Runs a planned step on the pipeline of this process."""
