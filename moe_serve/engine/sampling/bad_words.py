"""Words that an answer must not hold, as token sequences. The rule is vLLM's."""

from __future__ import annotations

from dataclasses import replace

from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.text.tokenizer import Tokenizer


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Each word as the tokenizer writes it at the beginning of a text, and after a space where
    that takes as many tokens. Other spellings of it (`b` + `ad`) are not banned."""
    if not params.bad_words:
        return params
    banned: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        banned[tuple(tokenizer.encode(word, add_special_tokens=False))] = None
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            banned[spaced] = None
    return replace(params, bad_word_ids=tuple(word for word in banned if word))
