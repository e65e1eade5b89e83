"""Rows grouped by expert, in tiles of one expert each: what the grouped GEMM walks over."""
