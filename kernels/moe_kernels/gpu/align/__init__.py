"""Groups rows by expert, in tiles of one expert each, for the grouped matrix products."""
