"""Several cells under one coordinator: which cell runs a request, and how it moves to another."""
