"""/v1/responses and what belongs to it: OpenAI's Responses, on top of the chat.

body.py          what a request may hold
input_items.py   its input as items with ids, and items as chat messages
tools.py         tools, tool_choice and text.format as a chat has them
to_chat.py       request and history -> the body of a chat
output_items.py  the answer as items, and the events of a stream as they grow
record.py        the response object
store.py         finished responses, for GET and previous_response_id
run.py           one response from its start to its end
background.py    those that nobody waits for, and keeping all of them
item_pages.py    the input of a stored response, a page at a time
routes.py        POST /v1/responses
stored_routes.py GET, DELETE and cancel of those that are stored
"""
