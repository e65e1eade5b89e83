"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens, built on the chat.

message_body.py     the request body
message_content.py  converts messages made of blocks to the messages of a chat
message_chat.py     converts a request and its tools to a chat
message_routes.py   the routes; answers as blocks and as the events of a stream
"""
