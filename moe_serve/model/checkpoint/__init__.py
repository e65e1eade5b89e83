"""Reads checkpoints: the configuration, the files and the names of tensors."""
