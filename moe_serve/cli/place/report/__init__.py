"""The tables and the report of `moe-serve place`."""
