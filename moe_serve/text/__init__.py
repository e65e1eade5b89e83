"""Converts text at the edges: tokenizer, chat template, incremental detokenizer, stop strings.

Nothing here knows HTTP or the engine's internals; `text_stream` reads only the engine's boundary
objects (`engine/request/request.py`, `engine/request/sampling_params.py`).
"""
