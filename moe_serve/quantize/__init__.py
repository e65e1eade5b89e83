"""Quantises checkpoints: plans, rounds weights, calibrates on texts, writes and measures."""
