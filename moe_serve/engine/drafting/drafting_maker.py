"""Builds the drafting that the configured method of speculation needs."""

from __future__ import annotations

from collections.abc import Callable

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.config.sections import EngineConfig, SpeculationConfig
from moe_serve.engine.drafting.draft import Drafter, DraftSource
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.guessing import Guessing
from moe_serve.engine.drafting.own_text import OwnText
from moe_serve.engine.drafting.past_answers import PastAnswers
from moe_serve.engine.drafting.prediction import Predictions
from moe_serve.engine.drafting.text_hashes import TextHashes
from moe_serve.engine.request.sequence import StopRule
from moe_serve.errors import ConfigError

MakeDrafting = Callable[[], Drafting | None]


def drafting_maker(
    config: SpeculationConfig, vocab_size: int, stop: StopRule, clock: Clock = REAL_CLOCK
) -> MakeDrafting:
    """Returns a function that builds an engine's drafting, or None if speculation is off. Several
    engines share the past answers. `clock` measures what drafting costs. Raises ConfigError for
    lengths that contradict each other."""
    if not config.is_on:
        return lambda: None
    shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
    if shortest > longest:
        raise ConfigError(
            f"speculation.prompt_lookup_min is {shortest} and must be at most "
            f"speculation.prompt_lookup_max, which is {longest}."
        )
    hashes = TextHashes()
    has_past = "suffix" in config.drafters
    past = PastAnswers(config.suffix_max_tokens, hashes) if has_past else None

    def make() -> Drafting:
        own = OwnText(shortest, longest, stop.max_model_len, hashes)
        drafters: list[Drafter] = [Predictions(), own]
        if past is not None:
            drafters.insert(1, past)
        return Drafting(
            drafters,
            stop,
            vocab_size=vocab_size,
            max_tokens=config.max_tokens,
            is_adaptive=config.is_adaptive,
            past_answers=past,
            guessing=_guessing(config),
            guesses_take_pages=config.method == "self",
            clock=clock,
        )

    return make


def _guessing(config: SpeculationConfig) -> Guessing | None:
    """Returns the decider about guesses of the method's network; None if it has no network."""
    if not config.num_guesses:
        return None
    source = DraftSource(config.method)
    return Guessing(source, config.num_guesses, is_adaptive=config.is_adaptive)


def check_on_ranks(config: EngineConfig) -> None:
    """Raises ConfigError if the method cannot run with separate ranks."""
    method, num_shards = config.speculation.method, config.cluster.attention_tp
    if method == "self":
        raise ConfigError(
            "speculation.method is 'self', which needs all experts in the process that samples, "
            "but this cluster has separate ranks: use 'auto'."
        )
    if method == "head" and num_shards > 1:
        raise ConfigError(
            f"speculation.method is 'head', which needs the whole output head on one rank, but "
            f"cluster.attention_tp is {num_shards}: set it to 1, or use 'auto'."
        )
