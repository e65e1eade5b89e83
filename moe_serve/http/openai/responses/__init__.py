"""OpenAI's Responses API under /v1/responses, built on the chat.

body.py          the request body
input_items.py   the request's input as items with ids, and items as chat messages
tools.py         converts tools, tool_choice and text.format to those of a chat
to_chat.py       converts a request and its history to a chat
output_items.py  the answer as items, and the events of a stream
record.py        the response object
store.py         finished responses, for GET and previous_response_id
run.py           runs one response from start to end
background.py    background responses, and storing responses
routes.py        POST /v1/responses
stored_routes.py GET, DELETE and cancel of stored responses, and their input in pages
"""
