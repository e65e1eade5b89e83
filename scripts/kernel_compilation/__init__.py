"""Triton kernels compiled ahead of time: the compiler's facts, the rules, the cache, the table."""
