"""Judges the orders of a queue by service tiers, on recorded workloads in the simulator."""
