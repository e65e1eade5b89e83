"""Runs a server or ranks under load for a long time, with all kinds of clients or with killed
ranks.
"""
