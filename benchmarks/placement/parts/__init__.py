"""The parts of the benchmark: each file has a function `run(setting)` that yields results.

`benchmarks/run.py placement` finds the files by name, so a new part is a new file here.
"""
