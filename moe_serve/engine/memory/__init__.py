"""Plans and allocates the memory of the KV pages."""
