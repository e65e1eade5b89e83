"""The configuration: its sections, the range of each key, and where values come from."""
