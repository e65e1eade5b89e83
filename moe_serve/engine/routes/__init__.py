"""Passes the routing of computed tokens to its listeners."""
