"""Tracks which ranks are there: starting, joining, heartbeats, losses."""
