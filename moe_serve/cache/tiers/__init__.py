"""KV pages outside the cache: pages on a disk, which survive a restart."""
