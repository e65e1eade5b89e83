"""The work of an attention rank, an expert rank and a tensor shard."""
