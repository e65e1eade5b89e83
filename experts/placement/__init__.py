"""Places experts on ranks and chooses the copy that serves a row. Needs numpy, never torch."""
