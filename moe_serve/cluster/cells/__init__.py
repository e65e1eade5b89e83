"""Several cells under one coordinator: which cell a request runs in, and how it moves to another."""
