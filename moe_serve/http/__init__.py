"""The OpenAI-compatible HTTP server: routes, request schemas, SSE, keys, errors, metrics.

edge.py, auth.py        every request: id, metrics, last error boundary; API key
*_protocol.py           uvicorn's two, with limits for heads and for readers that do not read
body.py, schemas.py     bytes -> checked request object, or a 4xx that names the field
*_routes.py             one file per family of routes
generation.py           engine requests of one HTTP request, and their text as it comes
*_format.py             OpenAI's shapes, as JSON and as SSE events
app.py, server.py       the FastAPI application; uvicorn, signals and drain
"""
