"""Solvers of the placement problem; each folder holds one."""
