"""Requests in, tokens out: sequences, scheduler, sampler, and the step that joins them."""
