"""Watches the engine: hangs, expert load, use of the pools, and the startup."""
