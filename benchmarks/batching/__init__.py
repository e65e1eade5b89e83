"""Measures batches packed by expected experts, and the predictions that they need."""
