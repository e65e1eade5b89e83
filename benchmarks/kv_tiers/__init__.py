"""Benchmarks of the KV tiers."""
