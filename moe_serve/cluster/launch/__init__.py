"""How one command becomes the processes of many nodes: where a node is, and what runs on it."""
