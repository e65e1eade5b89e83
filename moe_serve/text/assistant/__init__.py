"""Parses a model's text as an assistant message: content, reasoning and tool calls, while text
arrives.

    delta.py            what is new: AssistantDelta, CallDelta
    parser.py           the protocol of every parser, the plain one, and the base of the others
    reader.py           reads text that arrives in pieces as if it were all there
    outbox.py           holds parsed pieces until they are handed out
    json_call.py, typed_arguments.py   a call's arguments, as JSON or as text between tags
    hermes.py, qwen_xml.py, glm.py, mistral.py, deepseek.py, harmony.py   one file per call format
    thinking.py         reasoning in front of the answer
    formats.py          formats by name, the markers of reasoning; the parser of one request
    format_grammars.py  grammars that force a call in each format, and those of the reasoning before
    spelling.py         markers in grammars
"""
