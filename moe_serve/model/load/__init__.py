"""Loads the weights of a checkpoint into the stages."""
