"""Reads adapters, which are fine-tunes of the base model, and keeps those that requests name."""
