"""Converts banned words of an answer into token sequences, by vLLM's rule."""

from __future__ import annotations

from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.text.tokenizer import Tokenizer


def bad_word_ids(
    params: SamplingParams, thinking: ThinkingMarkers | None, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of the bad words. They must not be in the way of a thinking limit.

    Each word is encoded as at the beginning of a text, and also after a space if that takes as many
    tokens. Other spellings (`b` + `ad`) are not banned.
    """
    if not params.bad_words:
        return params.bad_word_ids
    banned: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        banned[tuple(tokenizer.encode(word, add_special_tokens=False))] = None
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            banned[spaced] = None
    found = tuple(word for word in banned if word)
    if thinking is not None:
        params.check_thinking_end(thinking.end, found)
    return found
