"""Runs a server or ranks under load for long, with all kinds of clients or with killed ranks."""
