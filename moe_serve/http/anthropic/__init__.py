"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens, built on the chat.

body.py            the request body
content.py         converts messages made of blocks to the messages of a chat
tools.py           converts tools and tool_choice to those of a chat
to_chat.py         converts a request to a chat
content_blocks.py  the answer as blocks, and the events of a stream
run.py             runs one message from start to end
routes.py          the routes
"""
