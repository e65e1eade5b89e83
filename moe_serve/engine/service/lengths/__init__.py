"""Predicts how long answers will be, from earlier answers and from the request itself."""
