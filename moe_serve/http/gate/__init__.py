"""Decides who may enter: keys, hosts, origins, and how fast a client may be served."""
