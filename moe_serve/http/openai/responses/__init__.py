"""OpenAI's Responses API under /v1/responses, built on the chat.

response_body.py    the request body
input_items.py      the request's input as items with ids, and items as chat messages
response_chat.py    converts a request, its tools and its history to a chat
output_items.py     the answer as items, and the events of a stream
response_run.py     runs one response from start to end; the response object
response_store.py   finished responses, for GET and previous_response_id; background responses
response_routes.py  POST /v1/responses; GET, DELETE and cancel of stored responses
"""
