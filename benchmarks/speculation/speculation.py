"""Measures the gain of drafted tokens over the same requests without drafts.

    python benchmarks/run.py speculation
    python benchmarks/run.py speculation --parts natural,wrong --rounds 7
    python benchmarks/run.py speculation --model FOLDER --parts oracle,random-prediction
    python benchmarks/run.py speculation --parts self --self-experts 1
    python benchmarks/run.py speculation --parts self --expert-memory 0.5 --latency-us 80 \
        --gigabytes-per-s 3

Both kinds of turns run in one process, in turns, and must give the same tokens. Parts: `oracle`
(a drafter that is always right), `repeated` (requests that were answered before), `prediction` (the
client sends the answer with some tokens edited), `schema` (JSON with long keys), `natural` (text
without loops), `wrong` (drafts that are never right), `auto` (the controller beside fixed lengths),
`head` (a trained head), `self` (the model itself with fewer experts). `auto` compares on repeated
requests and on natural text, and prints below the table which share of the best length it reaches.
`ranks` runs both on 1A1E and in one process, `time` measures what looking for drafts costs, and
`head-limit` computes the most that the head's guesses can gain. `controller` compares the
controller with fixed lengths in virtual time, so other programs do not disturb it, and `costs`
measures the steps of which it is made.

A model with random weights can run `oracle` and `random-prediction` only, as its answers mean
nothing. `oracle` also prints which share of (K + 1) / v(K + 1) the engine reaches, with v of the
model alone, and U(n), how many experts of a layer n consecutive tokens chose.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from expert_memory.expert_memory import Tier, expert_bytes, slow_weights
from harness.environment import describe_environment, write_report
from moe_serve.clock import REAL_CLOCK
from moe_serve.config.sections import SpeculationMethod
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.tokenizer import Tokenizer

from .controller import controller_lines
from .drafting_time import drafting_times
from .head_limit import head_limits
from .ranks import gains_by_layout
from .step_costs import step_costs
from .turns import Bench, Comparison, line
from .workloads import loops, natural, random_prompts, structured, with_predictions

_TOKENS = 160
_NUM_PROMPTS = 16


class _Parts:
    """The parts of the benchmark on one engine."""

    def __init__(
        self, bench: Bench, tokenizer: Tokenizer | None, rounds: int, batches: Sequence[int]
    ) -> None:
        """`batches` are those of the oracle."""
        self._bench, self._rounds, self._tokenizer = bench, rounds, tokenizer
        self._batches = batches
        self._vocab_size = bench.built.layout.vocab_size

    @property
    def _text(self) -> Tokenizer:
        assert self._tokenizer is not None, "this part needs a tokenizer"
        return self._tokenizer

    def plain(self, batch: int) -> list[GenerationRequest]:
        """Returns greedy requests that any model can answer."""
        if self._tokenizer is None:
            return random_prompts(self._vocab_size, batch, _TOKENS // 2)
        return natural(self._text, batch, _TOKENS, 0.0)

    def oracle(self) -> Iterator[Comparison]:
        for batch in self._batches:
            asked = self.plain(batch)
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
                lambda number, t=temperature: self.unlooped(t, number),  # type: ignore[misc]
                lambda warm=warm: warm,  # type: ignore[misc]
            )

    def head(self) -> Iterator[Comparison]:
        """Needs an engine that was built with the method head."""
        return self._by_model("head")

    def by_self(self) -> Iterator[Comparison]:
        """Needs an engine that was built with the method self."""
        return self._by_model("self")

    def _by_model(self, method: SpeculationMethod) -> Iterator[Comparison]:
        for temperature in (0.0, 0.7):
            warm = self._bench.drafting(method=method)
            yield self._compare(
                f"{method}, T = {temperature}",
                lambda number, t=temperature: self.unlooped(t, number),  # type: ignore[misc]
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
            for kind, temperature in (("repeated", 0.0), ("natural", 0.7)):
                for length in (None, 1, 3, 5, 8):
                    yield self._fixed(kind, temperature, batch, length)

    def _fixed(self, kind: str, temperature: float, batch: int, length: int | None) -> Comparison:
        """Compares one length of drafts, or the controller, with none."""
        fixed = {} if length is None else {"max_tokens": length, "is_adaptive": False}
        warm = self._bench.drafting(method="auto", **fixed)

        def asked(number: int) -> list[GenerationRequest]:
            first = 0 if kind == "repeated" else (1 + number) * batch
            return natural(self._text, batch, 96, temperature, first=first)

        self._bench.turn(asked(-1), warm)  # other natural text than that of the turns
        name = AUTO if length is None else f"K = {length}"
        return self._compare(f"{kind}, batch {batch}, {name}", asked, lambda: warm)

    def random_prediction(self) -> Iterator[Comparison]:
        """Predictions of the answers of a model with random weights, with 5% of tokens edited."""
        warm = self._bench.drafting(method="ngram")
        plain = random_prompts(self._vocab_size, 1, _TOKENS // 2)
        answers = self._bench.turn(plain, None).answers
        asked = with_predictions(plain, answers, 0.05, self._vocab_size)
        yield self._compare("prediction, 5% edited", lambda _: asked, lambda: warm)

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
            clock=self._bench.clock,
        )

    def unlooped(self, temperature: float, number: int) -> list[GenerationRequest]:
        """Returns a request whose answer does not end in a loop."""
        for first in range(number * _NUM_PROMPTS, (number + 1) * _NUM_PROMPTS):
            asked = natural(self._text, 1, _TOKENS, temperature, first=first + number)
            answer = self._bench.turn(asked, None).answers["r0"]
            if not loops(answer):
                return asked
            shorter = [replace(r, params=replace(r.params, max_tokens=64)) for r in asked]
            if not loops(answer[:64]):
                return shorter
        raise RuntimeError("every answer loops")


AUTO = "auto"
ALONE: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "ranks": lambda options: gains_by_layout(options.rounds, options.threads),
    "time": lambda options: drafting_times(options.rounds),
    "head-limit": lambda options: head_limits_of(options),
    "controller": lambda options: controller_lines(_bench(options, ()), options.rounds),
    "costs": lambda options: step_costs(_bench(options, ()), options.rounds),
}
PARTS = {
    "oracle": _Parts.oracle,
    "repeated": _Parts.repeated,
    "prediction": _Parts.prediction,
    "schema": _Parts.schema,
    "natural": _Parts.natural,
    "wrong": _Parts.wrong,
    "auto": _Parts.auto,
    "head": _Parts.head,
    "self": _Parts.by_self,
    "random-prediction": _Parts.random_prediction,
}
_USUAL = ("oracle", "repeated", "prediction", "schema", "natural", "wrong", "auto")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="checkpoint with random weights (default: demonstration)")
    names = f"some of {', '.join(PARTS)}; or one of {', '.join(ALONE)} alone"
    parser.add_argument("--parts", default=None, help=names)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="kernel threads (default 1)")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4, 16), help="for oracle")
    parser.add_argument("--self-experts", type=int, default=2, help="for self (default 2)")
    parser.add_argument("--expert-memory", type=float, help="share of the experts in memory")
    parser.add_argument("--latency-us", type=float, default=0.0, help="of an expert tensor's read")
    parser.add_argument("--gigabytes-per-s", type=float, default=float("inf"), help="of reads")
    busy_help = "the controller measures processor time, as other programs use this machine"
    parser.add_argument("--busy", action="store_true", help=busy_help)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.parts in ALONE:
        for text in ALONE[options.parts](options):
            print(text, flush=True)
        return 0
    wanted = (options.parts or ("oracle" if options.model else ",".join(_USUAL))).split(",")
    if unknown := set(wanted) - set(PARTS):
        print(f"There is no part {sorted(unknown)[0]!r}: give {names}.")
        return 2
    bench = _bench(options, wanted)
    tokenizer = None if options.model else Tokenizer.load(bench.built.layout.folder)
    parts = _Parts(bench, tokenizer, options.rounds, options.batches)
    environment = describe_environment()
    print(" ".join(f"{key}={value}" for key, value in environment.items()))
    print(f"{'':36} speedup (range)       by CPU  tok/step accepted rows/step v(n)  drafter us")
    found = []
    for name in wanted:
        for comparison in PARTS[name](parts):
            found.append(comparison)
            print(line(comparison), flush=True)
    for text in shares_of_best(found):
        print(text)
    if "oracle" in wanted:
        for each in found:
            if each.name.startswith("oracle"):
                print(
                    f"{each.name}: {each.efficiency:.2f} of (K + 1) / v(K + 1), where v is that of "
                    f"the model alone, {each.forward_ratio:.2f}"
                )
        print(_experts_line(bench, parts))
    write_report(options.json, {**environment, "figures": [asdict(each) for each in found]})
    return 0


def head_limits_of(options: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of the part `head-limit`."""
    bench = _bench(options, ["head"])
    tokenizer = Tokenizer.load(bench.built.layout.folder)
    parts = _Parts(bench, tokenizer, options.rounds, ())
    kinds = {
        f"T = {temperature}": lambda number, t=temperature: parts.unlooped(t, number)
        for temperature in (0.0, 0.7)
    }
    yield from head_limits(bench, kinds, options.rounds)


def _experts_line(bench: Bench, parts: _Parts) -> str:
    by_count = bench.experts_of(parts.plain(1))
    return "U(n): " + ", ".join(f"{count}: {number:.1f}" for count, number in by_count.items())


def shares_of_best(found: Sequence[Comparison]) -> Iterator[str]:
    """Tells for each workload of `auto` how near the controller came to the best fixed setting, of
    which one is to draft nothing."""
    speedups: dict[str, dict[str, float]] = {}
    for each in found:
        workload, _, setting = each.name.rpartition(", ")
        if workload.startswith(("repeated, batch", "natural, batch")):
            speedups.setdefault(workload, {"off": 1.0})[setting] = each.speedup
    for workload, by_setting in speedups.items():
        auto = by_setting.pop(AUTO)
        best = max(by_setting, key=by_setting.__getitem__)
        share = auto / by_setting[best]
        yield f"{workload}: {share:.2f} of the best ({best}), {auto:.2f} of off"


def _bench(options: argparse.Namespace, wanted: Sequence[str]) -> Bench:
    method: SpeculationMethod = "auto"
    if "head" in wanted:
        method = "head"
    elif "self" in wanted:
        method = "self"
    num_bytes, tier = None, Tier()
    if options.expert_memory is not None:
        folder = demo_model_folder() if options.model is None else Path(options.model)
        num_bytes = int(expert_bytes(folder) * options.expert_memory)
        tier = Tier(options.latency_us * 1e-6, options.gigabytes_per_s * 1e9)
    return Bench(
        options.model,
        options.threads,
        method,
        self_experts=options.self_experts,
        expert_memory_bytes=num_bytes,
        open_weights=slow_weights(tier),
        clock=time.thread_time if options.busy else REAL_CLOCK,
    )


if __name__ == "__main__":
    sys.exit(main())
