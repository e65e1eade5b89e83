"""One attention and one expert rank, a core each: what micro-batches bring (see pingpong.py)."""
