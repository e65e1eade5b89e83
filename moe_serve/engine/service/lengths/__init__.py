"""Predicts how long answers will be, from what is known when a request arrives."""
