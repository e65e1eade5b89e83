"""Records a hash of the tokens and log probabilities of every family, or checks a recording.

    python scripts/token_hashes.py record scripts/token_hashes.json
    python scripts/token_hashes.py check scripts/token_hashes.json

Each model (the demonstration model and a tiny random checkpoint of each family) answers the same
prompts in one process and on one attention and two expert ranks, greedily and with seeds. A hash
covers the token ids and the exact log probabilities of all answers. It uses only what `moe_serve`
exports, so that one script can be run on two versions of the code. Bits depend on the instruction
set and on torch, which the recording names: compare recordings of one machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from make_random_model import Sizes, write_random_model
from moe_serve import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for the tiny models that the tests write
PLAIN_FAMILIES = ("mixtral", "olmoe", "qwen3_moe")  # written without transformers
LAYOUTS = {"one process": (0, 0), "1A2E": (1, 2)}
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3),
    "seeded": SamplingParams(
        temperature=0.8, top_p=0.95, seed=7, n=2, max_tokens=24, ignore_eos=True, logprobs=3
    ),
}
PROMPT_LENGTHS = (1, 5, 16, 17, 40)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {"machine": machine(), "hashes": dict(all_hashes(Path(folder)))}
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    return compare(json.loads(arguments.file.read_text("utf-8")), found)


def compare(recorded: dict[str, Any], found: dict[str, Any]) -> int:
    """Prints every difference; the exit code is 1 if there is one, 2 if nothing can be compared."""
    if recorded["machine"] != found["machine"]:
        print(f"recorded on {recorded['machine']}, this is {found['machine']}: not comparable")
        return 2
    names = sorted(recorded["hashes"].keys() | found["hashes"].keys())
    different = [n for n in names if recorded["hashes"].get(n) != found["hashes"].get(n)]
    print("\n".join(f"different: {name}" for name in different), end="\n" if different else "")
    print(f"{len(names) - len(different)} of {len(names)} hashes are equal")
    return 1 if different else 0


def machine() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def all_hashes(folder: Path) -> Iterator[tuple[str, str]]:
    for name, path in checkpoints(folder):
        for layout, (attention_ranks, expert_ranks) in LAYOUTS.items():
            for dtype in ("bfloat16", "float32"):
                with LLM(
                    None if path is None else str(path),
                    dtype=dtype,
                    num_pages=256,
                    attention_ranks=attention_ranks,
                    expert_ranks=expert_ranks,
                ) as llm:
                    for sampling, params in SAMPLING.items():
                        key = f"{name}, {dtype}, {layout}, {sampling}"
                        print(key, file=sys.stderr, flush=True)
                        yield key, answers_hash(llm, params)


def answers_hash(llm: LLM, params: SamplingParams) -> str:
    """Hashes the token ids and the log probabilities, to the last bit, of all answers."""
    vocab_size = min(llm.layout.vocab_size, 256)
    prompts = [[(7 * n + 3 * i) % vocab_size for i in range(n)] for n in PROMPT_LENGTHS]
    digest = hashlib.sha256()
    for output in llm.generate(prompts, params, use_progress_bar=False):
        for answer in output.outputs:
            digest.update(repr(answer.token_ids).encode())
            for position in answer.logprobs or []:
                pairs = [(token, item.logprob.hex()) for token, item in sorted(position.items())]
                digest.update(repr(pairs).encode())
    return digest.hexdigest()[:16]


def checkpoints(folder: Path) -> Iterator[tuple[str, Path | None]]:
    """Yields the name and the folder of each model; None is the demonstration model."""
    yield "demonstration model", None
    sizes = Sizes(
        num_layers=3,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        num_experts=8,
        top_k=2,
        expert_width=40,
        vocab_size=300,
        max_positions=512,
    )
    for family in PLAIN_FAMILIES:
        path = folder / family
        write_random_model(path, family, sizes, dtype="float32", seed=1, shard_bytes=2**30)
        yield family, with_tokenizer(path)
    yield from case_checkpoints(folder)


def case_checkpoints(folder: Path) -> Iterator[tuple[str, Path]]:
    """Writes the first test case of each architecture that the plain families do not cover."""
    parity = importlib.import_module("tests.support.families.parity")
    cases = importlib.import_module("tests.support.families.all_cases").CASES
    seen: set[str] = set()
    for name, case in cases.items():
        architecture = type(case.config).__name__
        if architecture not in seen:
            seen.add(architecture)
            yield name, parity.write_checkpoint(folder / name, case)


def with_tokenizer(path: Path) -> Path:
    parity = importlib.import_module("tests.support.families.parity")
    parity.byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


if __name__ == "__main__":
    raise SystemExit(main())
