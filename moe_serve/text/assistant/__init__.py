"""Parses a model's text as an assistant message: content, reasoning and tool calls, while text
arrives.

    parser.py           the protocol of every parser, the plain one, the base of the others, and
                        reasoning in front of the answer
    reader.py           reads text that arrives in pieces as if it were all there
    outbox.py           holds parsed pieces until they are handed out as AssistantDelta, CallDelta
    json_call.py        a call written as JSON
    tool.py             a tool, and its arguments written as text between tags
    *_format(s).py      one file per family of call formats
    formats.py          formats by name, the markers of reasoning; the parser of one request
    format_grammars.py  grammars that force a call in each format, and those of the reasoning before
    spelling.py         markers in grammars
"""
