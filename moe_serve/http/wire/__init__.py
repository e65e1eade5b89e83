"""The connection to uvicorn: protocols, transports and bodies; and routes that are built late."""
