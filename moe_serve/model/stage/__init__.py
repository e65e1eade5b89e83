"""Computes the attention stage of a decoder layer."""
