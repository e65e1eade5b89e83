"""Measures a server over HTTP: speed, many streams, the cost of HTTP, tracing, prefix reuse."""
