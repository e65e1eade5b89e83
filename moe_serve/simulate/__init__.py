"""Runs the server's own engines on a virtual clock, with a cost model in place of a device."""
