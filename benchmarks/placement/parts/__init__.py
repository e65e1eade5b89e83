"""A part of the benchmark a file, with `run(setting)` that yields results.

`benchmarks/run.py placement` finds them by name, so a new part is a new file here.
"""
