"""What a model writes as an assistant: content, reasoning and tool calls, told apart as text comes.

delta.py            what is new: AssistantDelta, CallDelta
parser.py           the protocol of every parser, the plain one, and the ground of the others
reader.py           reading text that comes in pieces as if it were all there
outbox.py           what has been found and not yet handed out
json_call.py, typed_arguments.py   a call's arguments, as JSON or as text between tags
hermes.py, qwen_xml.py, glm.py, mistral.py, deepseek.py, harmony.py   a file per format of calls
thinking.py         reasoning in front of the answer
formats.py          formats by name; the parser of one request
call_grammar.py     grammars that force a call in each format
thought_ends.py     the markers of reasoning for a limit of it
lead.py             grammars of the reasoning that comes before an answer that follows one
spelling.py         how grammars say a marker
"""
