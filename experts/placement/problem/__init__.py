"""Describes a placement problem: loads, devices, limits, and the placement that answers it."""
