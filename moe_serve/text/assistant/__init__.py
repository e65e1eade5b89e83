"""Parses a model's text as an assistant message: content, reasoning and tool calls, while text
arrives.

    parser.py           the protocol of every parser, the plain one, the base of the others, and
                        reasoning in front of the answer
    reader.py           reads text that arrives in pieces as if it were all there
    outbox.py           holds parsed pieces until they are handed out as AssistantDelta, CallDelta
    tool.py             a tool, and its arguments written as text between tags
    call_formats.py     calls as JSON or between tags: Hermes, Qwen, GLM, Mistral
    *_format.py         the call formats of DeepSeek and gpt-oss
    formats.py          formats by name, the markers of reasoning; the parser of one request
    format_grammars.py  grammars that force a call in each format, and those of the reasoning before
"""
