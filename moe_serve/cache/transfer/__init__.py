"""KV pages on their way to another rank: their bytes, independent of how shards hold the heads."""
