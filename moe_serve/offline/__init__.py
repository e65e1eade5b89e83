"""The engine from Python: `LLM`, the offline counterpart of the server."""
