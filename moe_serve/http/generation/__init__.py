"""Turns a validated request into engine requests, and the answers into text."""
