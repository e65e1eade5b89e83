"""`moe-serve models`: what the cache of models holds, and fetching or removing a model."""
