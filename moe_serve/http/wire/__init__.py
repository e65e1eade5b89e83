"""The edge towards uvicorn: connections, transports and bodies."""
