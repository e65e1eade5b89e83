"""The connection to uvicorn: protocols, transports and bodies."""
