"""Kernels in Triton for NVIDIA GPUs, one folder each: api, heuristics, kernel, compile_cases.

Nothing here is imported unless a CUDA device runs the model: only this package imports triton.
"""
