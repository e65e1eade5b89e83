"""Benchmarks of cells: KV pages between ranks."""
