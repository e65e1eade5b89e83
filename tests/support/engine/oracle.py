"""Makes an engine verify the drafts of an oracle."""

from __future__ import annotations

from moe_serve.engine.drafting.draft import Drafter
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.engine import Engine


def give_drafts(
    engine: object,
    oracle: Drafter,
    *,
    most: int = 5,
    vocab_size: int = 50,
    is_adaptive: bool = False,
) -> Drafting:
    """Makes an engine verify the oracle's drafts."""
    assert isinstance(engine, Engine), f"{engine}"
    drafting = Drafting(
        [oracle], engine.stop_rule, vocab_size=vocab_size, max_tokens=most, is_adaptive=is_adaptive
    )
    engine.drafts.use(drafting)
    return drafting
