"""Builds and prints the report of `moe-serve place`: tables and pictures."""
