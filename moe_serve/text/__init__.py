"""Text at the edges: tokenizer, chat template, incremental detokenizer, stop strings.

Nothing here knows of HTTP or of the engine's insides; `text_stream` reads the engine's boundary
objects (`engine/request/request.py`, `engine/request/sampling_params.py`) and nothing else of it.
"""
