"""Turns requests into tokens: sequences, scheduler, sampler, and the engine that joins them."""
