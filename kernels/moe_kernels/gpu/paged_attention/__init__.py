"""Attention of a step's query rows over paged keys and values."""
