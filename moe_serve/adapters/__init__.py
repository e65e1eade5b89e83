"""Adapters: reads fine-tunes of the base model, and keeps those that requests name."""
