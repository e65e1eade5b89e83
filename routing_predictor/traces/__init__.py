"""Records, stores and describes the routing of tokens."""
