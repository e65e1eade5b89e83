"""Measures the stages on this machine, and predicts what a layout would cost."""
