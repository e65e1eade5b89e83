"""Passes the routers' choices for computed tokens to listeners."""
