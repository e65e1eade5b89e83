"""Turns a chat or a completion of any API into engine requests, and the answers into text."""
