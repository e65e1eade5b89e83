"""Measures the gain of drafted tokens over the same requests without drafts.

    python benchmarks/run.py speculation
    python benchmarks/run.py speculation --parts natural,wrong --rounds 7
    python benchmarks/run.py speculation --model FOLDER --parts oracle

Both kinds of turns run in one process, in turns, and must give the same tokens. Parts: `oracle`
(a drafter that is always right), `repeated` (requests that were answered before), `prediction` (the
client sends the answer with some tokens edited), `schema` (JSON with long keys), `natural` (text
without loops), `wrong` (drafts that are never right), `auto` (the controller beside fixed lengths),
`head` (a trained head; run it alone, as its guesses cost time in every part).
A model with random weights can run `oracle` only, as its answers mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from harness.environment import describe_environment, write_report
from moe_serve.config.sections import SpeculationMethod
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.text.tokenizer import Tokenizer

from .turns import Bench, Comparison, line
from .workloads import loops, natural, random_prompts, structured, with_predictions

_TOKENS = 160
_NUM_PROMPTS = 16


class _Parts:
    """The parts of the benchmark on one engine."""

    def __init__(self, bench: Bench, tokenizer: Tokenizer | None, rounds: int) -> None:
        self._bench, self._rounds, self._tokenizer = bench, rounds, tokenizer
        self._vocab_size = bench.built.layout.vocab_size

    @property
    def _text(self) -> Tokenizer:
        assert self._tokenizer is not None, "this part needs a tokenizer"
        return self._tokenizer

    def oracle(self) -> Iterator[Comparison]:
        for batch in (1, 4, 16):
            if self._tokenizer is None:
                asked = random_prompts(self._vocab_size, batch, _TOKENS // 2)
            else:
                asked = natural(self._text, batch, _TOKENS, 0.0)
            answers = self._bench.turn(asked, None).answers
            for most in (5, 15):
                yield self._compare(
                    f"oracle, K = {most}, batch {batch}",
                    lambda _, asked=asked: asked,  # type: ignore[misc]
                    lambda answers=answers, most=most: self._oracle(answers, 1.0, most),  # type: ignore[misc]
                )

    def repeated(self) -> Iterator[Comparison]:
        for batch in (1, 8):
            asked = natural(self._text, batch, _TOKENS, 0.0)
            warm = self._bench.drafting(method="suffix")
            self._bench.turn(asked, warm)
            yield self._compare(f"repeated, batch {batch}", lambda _, a=asked: a, lambda w=warm: w)  # type: ignore[misc]

    def prediction(self) -> Iterator[Comparison]:
        for share in (0.05, 0.2):
            warm = self._bench.drafting(method="ngram")

            def asked(number: int, share: float = share) -> list[GenerationRequest]:
                plain = natural(self._text, 1, _TOKENS, 0.0, first=number)
                answers = self._bench.turn(plain, None).answers
                return with_predictions(plain, answers, share, self._vocab_size)

            name = f"prediction, {share:.0%} edited"
            yield self._compare(name, asked, lambda warm=warm: warm)  # type: ignore[misc]

    def schema(self) -> Iterator[Comparison]:
        for batch in (1, 16):
            warm = self._bench.drafting(method="auto")
            yield self._compare(
                f"schema, batch {batch}",
                lambda number, batch=batch: structured(self._text, batch, batch * number),  # type: ignore[misc]
                lambda warm=warm: warm,  # type: ignore[misc]
            )

    def natural(self) -> Iterator[Comparison]:
        for temperature in (0.0, 0.7, 1.0):
            warm = self._bench.drafting(method="auto")
            yield self._compare(
                f"natural text, T = {temperature}",
                lambda number, t=temperature: self._unlooped(t, number),  # type: ignore[misc]
                lambda warm=warm: warm,  # type: ignore[misc]
            )

    def head(self) -> Iterator[Comparison]:
        """Needs an engine that was built with the method head."""
        for temperature in (0.0, 0.7):
            warm = self._bench.drafting(method="head")
            yield self._compare(
                f"head, T = {temperature}",
                lambda number, t=temperature: self._unlooped(t, number),  # type: ignore[misc]
                lambda warm=warm: warm,  # type: ignore[misc]
            )

    def wrong(self) -> Iterator[Comparison]:
        for batch in (1, 4, 16, 64):
            asked = natural(self._text, batch, 80, 1.0)
            warm = self._oracle({}, 0.0, 16, is_adaptive=True)
            yield self._compare(
                f"drafts never right, batch {batch}",
                lambda _, asked=asked: asked,  # type: ignore[misc]
                lambda warm=warm: warm,  # type: ignore[misc]
            )

    def auto(self) -> Iterator[Comparison]:
        for batch in (1, 2, 4, 8, 16, 32, 64):
            asked = natural(self._text, batch, 96, 0.0)
            for length in (None, 1, 3, 5, 8):
                settings = {} if length is None else {"max_tokens": length, "is_adaptive": False}
                warm = self._bench.drafting(method="suffix", **settings)
                self._bench.turn(asked, warm)
                name = "auto" if length is None else f"K = {length}"
                yield self._compare(
                    f"repeated, batch {batch}, {name}",
                    lambda _, asked=asked: asked,  # type: ignore[misc]
                    lambda warm=warm: warm,  # type: ignore[misc]
                )

    def _compare(
        self,
        name: str,
        asked: Callable[[int], list[GenerationRequest]],
        drafting: Callable[[], Drafting | None],
    ) -> Comparison:
        return self._bench.compare(name, asked, drafting, self._rounds)

    def _oracle(
        self, answers: dict[str, list[int]], alpha: float, most: int, *, is_adaptive: bool = False
    ) -> Drafting:
        oracle = Oracle(answers, alpha, vocab_size=self._vocab_size)
        return Drafting(
            [oracle],
            self._bench.engine.stop_rule,
            vocab_size=self._vocab_size,
            max_tokens=most,
            is_adaptive=is_adaptive,
        )

    def _unlooped(self, temperature: float, number: int) -> list[GenerationRequest]:
        """Return a request whose answer does not end in a loop."""
        for first in range(number * _NUM_PROMPTS, (number + 1) * _NUM_PROMPTS):
            asked = natural(self._text, 1, _TOKENS, temperature, first=first + number)
            answer = self._bench.turn(asked, None).answers["r0"]
            if not loops(answer):
                return asked
            shorter = [replace(r, params=replace(r.params, max_tokens=64)) for r in asked]
            if not loops(answer[:64]):
                return shorter
        raise RuntimeError("every answer loops")


PARTS = ("oracle", "repeated", "prediction", "schema", "natural", "wrong", "auto", "head")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="checkpoint with random weights (default: demonstration)")
    parser.add_argument("--parts", default=None, help=f"some of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="kernel threads (default 1)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    wanted = (options.parts or ("oracle" if options.model else ",".join(PARTS[:-1]))).split(",")
    if unknown := set(wanted) - set(PARTS):
        print(f"There is no part {sorted(unknown)[0]!r}. The parts are: {', '.join(PARTS)}.")
        return 2
    method: SpeculationMethod = "head" if "head" in wanted else "auto"
    bench = Bench(options.model, options.threads, method)
    tokenizer = None if options.model else Tokenizer.load(bench.built.layout.folder)
    parts = _Parts(bench, tokenizer, options.rounds)
    environment = describe_environment()
    print(" ".join(f"{key}={value}" for key, value in environment.items()))
    print(f"{'':36} speedup (range)       by CPU  tok/step accepted rows/step v(n)  drafter us")
    found = []
    for name in wanted:
        for comparison in getattr(parts, name)():
            found.append(comparison)
            print(line(comparison), flush=True)
    write_report(options.json, {**environment, "figures": [asdict(each) for each in found]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
