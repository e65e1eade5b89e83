"""Which expert lies on which rank, and which copy of it serves a row. Needs numpy, never torch."""
