"""The OpenAI-compatible HTTP server.

app.py, server.py   the FastAPI application; uvicorn, signals and drain
edge.py             the outermost middleware: request id, metrics, errors
loading.py          answers while the model is loading
gate/               access: keys, limits, hosts, origins
schema/             request bodies -> checked objects, or a 4xx that names the field
generation/         checked requests -> engine requests -> pieces of text
openai/, anthropic/ the routes and answers of the two APIs
admin/              health, status, placement and recording
dashboard/, pages/  the dashboard's data and its pages
metrics/, tracing/  Prometheus metrics and OpenTelemetry spans
wire/               connections, transports and TLS
"""
