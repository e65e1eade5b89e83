"""Parses a model's text as an assistant message: content, reasoning and tool calls, while text
arrives.

    delta.py            what is new: AssistantDelta, CallDelta
    parser.py           the protocol of every parser, the plain one, the base of the others, and
                        reasoning in front of the answer
    reader.py           reads text that arrives in pieces as if it were all there
    outbox.py           holds parsed pieces until they are handed out
    json_call.py, typed_arguments.py   a call's arguments, as JSON or as text between tags
    *_format.py         one file per call format
    formats.py          formats by name, the markers of reasoning; the parser of one request
    format_grammars.py  grammars that force a call in each format, and those of the reasoning before
    spelling.py         markers in grammars
"""
