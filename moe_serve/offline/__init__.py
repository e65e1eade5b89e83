"""The engine from Python: `LLM`, the offline twin of the server."""
