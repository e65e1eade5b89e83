"""Turns one command into the processes of many nodes: finds each node's place and starts its
ranks."""
