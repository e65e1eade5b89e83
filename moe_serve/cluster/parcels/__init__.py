"""Carries KV pages in parcels from the attention ranks of one cell to those of another."""
