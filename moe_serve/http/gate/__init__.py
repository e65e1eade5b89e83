"""Controls access: keys, hosts, origins, and how fast a client is served."""
