"""The HTTP client that commands use to talk to a running server."""
