"""Watches the engine: hangs, expert load, recent pools and the startup."""
