"""The HTTP client of the load generator."""
