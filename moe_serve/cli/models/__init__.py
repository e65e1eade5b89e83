"""`moe-serve models`: lists the models in the cache, downloads them and removes them."""
