"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages, on top of the chat.

body.py            what a request may hold
content.py         messages of blocks as the messages of a chat
tools.py           tools and tool_choice as a chat has them
to_chat.py         a request -> the body of a chat
content_blocks.py  the answer as blocks, and the events of a stream as they grow
run.py             one message from its start to its end
routes.py          the routes
"""
