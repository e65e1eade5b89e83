"""Samples answers of the demonstration model to prompts of eight domains, and keeps their lengths.

    python benchmarks/run.py length_answers --corpus CORPUS --out answers.jsonl --count 4800

The corpus has a folder for each domain with valid.txt.xz and train.txt.xz, whose documents end with
a line <|endoftext|>. A prompt is the beginning of a document, cut at a random word, or an
instruction without its response. No two prompts are of the same document. An answer ends with the
model's end of text, or at the end of a paragraph or function (a stop string).
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_serve import LLM, SamplingParams

STOPS = {  # as clients that complete texts use them: most documents are longer than any answer
    "stories": ["\n\n"],
    "encyclopedia": ["\n\n"],
    "instruct": [],
    "math": [],
    "code_python": ["\n\n\n", "\n    def ", "\ndef ", "\nclass "],
    "code_c": ["\n}\n"],
    "french": ["\n\n"],
    "german_law": ["\n\n"],
}
DOMAINS = tuple(STOPS)
_END, _RESPONSE = "<|endoftext|>", "### Response:"
_MOST_CHARACTERS = 900  # of a prompt
_SEATS, _GROUP = 96, 800  # requests at once, and requests that are given to the engine together


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer. `is_cut`: it reached max_tokens, so its length is only a lower bound."""

    domain: str
    prompt_ids: list[int]
    num_tokens: int
    is_cut: bool
    max_tokens: int
    temperature: float


def documents(corpus: Path, domain: str) -> Iterator[str]:
    """Yields the documents of a domain, those of valid first."""
    for part in ("valid", "train"):
        with lzma.open(corpus / domain / f"{part}.txt.xz", "rt", encoding="utf-8") as file:
            lines: list[str] = []
            for line in file:
                if line.strip() == _END:
                    yield "".join(lines)
                    lines = []
                else:
                    lines.append(line)


def prompts(corpus: Path, domain: str, count: int, rng: random.Random) -> list[str]:
    """Returns `count` prompts of different documents."""
    made: list[str] = []
    for text in documents(corpus, domain):
        prompt = _prompt(text.strip(), rng)
        if prompt:
            made.append(prompt)
        if len(made) >= 3 * count:
            break
    rng.shuffle(made)
    return made[:count]


def _prompt(text: str, rng: random.Random) -> str:
    if _RESPONSE in text:
        return text[: text.index(_RESPONSE) + len(_RESPONSE)] + "\n"
    if len(text) < 80:
        return ""
    cut = rng.randint(40, min(len(text) * 3 // 4, _MOST_CHARACTERS))
    space = text.rfind(" ", 0, cut)
    return text[: space if space > 20 else cut]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4800)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--samples", type=int, default=1, help="answers to each prompt")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    share = -(-arguments.count // len(DOMAINS))
    pairs = [(d, p) for d in DOMAINS for p in prompts(arguments.corpus, d, share, rng)]
    pairs *= arguments.samples
    rng.shuffle(pairs)
    params = {
        domain: SamplingParams(
            temperature=arguments.temperature, max_tokens=arguments.max_tokens, stop=tuple(stop)
        )
        for domain, stop in STOPS.items()
    }
    with LLM(max_num_seqs=_SEATS) as llm, arguments.out.open("w", encoding="utf-8") as file:
        for first in range(0, len(pairs), _GROUP):
            group = pairs[first : first + _GROUP]
            outputs = llm.generate(
                [prompt for _, prompt in group],
                [params[d] for d, _ in group],
                use_progress_bar=False,
            )
            for (domain, _), output in zip(group, outputs, strict=True):
                answer = output.outputs[0]
                row = Answer(
                    domain=domain,
                    prompt_ids=list(output.prompt_token_ids),
                    num_tokens=len(answer.token_ids),
                    is_cut=answer.finish_reason == "length",
                    max_tokens=arguments.max_tokens,
                    temperature=arguments.temperature,
                )
                file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            print(f"{first + len(group)} of {len(pairs)}", flush=True)
    return 0
