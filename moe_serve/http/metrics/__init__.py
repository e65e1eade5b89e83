"""The Prometheus metrics of the server."""
