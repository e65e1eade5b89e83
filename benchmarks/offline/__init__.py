"""Measures an engine offline, beside other engines: each pair takes turns at the same prompts."""
