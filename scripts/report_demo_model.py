"""Measures the exported demonstration model; writes docs/measured/demo-model.md and two pictures.

    python scripts/report_demo_model.py CORPUS --work build/demo --model moe_serve/demo_model

Exits with 1 if the model is less than 25% below the trigram in some domain, or an expert is dead.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from demo_model.corpus import DOMAINS, Corpus
from demo_model.evaluation import (
    MIN_GAIN,
    DomainResult,
    DomainScore,
    ExpertUse,
    evaluate,
    trigram_bits_per_byte,
)
from demo_model.export import TrainedWeights, load_exported
from demo_model.network import Shape
from demo_model.plots import TrainingLog, plot_expert_use, plot_training
from demo_model.report import Findings, generate_samples, render_report
from demo_model.training import Recipe


def main() -> int:
    parser = argparse.ArgumentParser(description="Report on the demonstration model.")
    parser.add_argument("corpus", type=Path, help="folder of <domain>/{train,valid}.txt.xz")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="training folder")
    parser.add_argument("--model", type=Path, default=Path("moe_serve/demo_model"))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="documentation folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hardware", default=None, help="hardware of the training, if not this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    findings = collect(
        arguments.corpus, arguments.work, arguments.model, arguments.hardware or _hardware()
    )
    images = arguments.docs / "images"
    plot_expert_use(findings.use, images / "demo-model-experts.png")
    plot_training(findings.log, images / "demo-model-training.png")
    page = arguments.docs / "measured" / "demo-model.md"
    page.write_text(render_report(findings), encoding="utf-8")
    return _verdict(findings.scores, findings.use)


def collect(corpus_root: Path, work: Path, folder: Path, hardware: str) -> Findings:
    """Measures all figures of the report."""
    shape = Shape()
    trained = TrainedWeights.read(work)
    scores, results = _score(corpus_root, folder, shape)
    choices = {domain: result.choices for domain, result in results.items()}
    return Findings(
        shape=shape,
        recipe=Recipe(budget_s=trained.train_seconds),
        num_steps=trained.num_steps,
        train_seconds=trained.train_seconds,
        num_stream_tokens=len(np.load(work / "train.npy", mmap_mode="r")),
        hardware=hardware,
        size_bytes=sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        scores=scores,
        use=ExpertUse.of(choices, shape.top_k),
        samples=generate_samples(folder),
        log=TrainingLog.read(work / "log.jsonl"),
    )


def _score(
    corpus_root: Path, folder: Path, shape: Shape
) -> tuple[list[DomainScore], dict[str, DomainResult]]:
    network = load_exported(folder, shape)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    train = Corpus.read(corpus_root, "train").documents
    valid = Corpus.read(corpus_root, "valid").documents
    results = {d: evaluate(network, tokenizer, valid[d]) for d in DOMAINS}
    scores = [
        DomainScore(
            domain=d,
            model=results[d].bits_per_byte,
            trigram=trigram_bits_per_byte(train[d], valid[d]),
            num_bytes=results[d].num_bytes,
            num_tokens=results[d].num_tokens,
        )
        for d in DOMAINS
    ]
    return scores, results


def _verdict(scores: list[DomainScore], use: ExpertUse) -> int:
    for s in scores:
        mark = "ok" if s.is_good else f"TOO LITTLE, {100 * MIN_GAIN:.0f}% is the bar"
        sys.stdout.write(
            f"{s.domain:13} {s.model:.3f} bits/byte, trigram {s.trigram:.3f}: "
            f"{100 * s.gain:5.1f}% below, {mark}\n"
        )
    num_dead = sum(layer.num_dead for layer in use.layers())
    sys.stdout.write(f"dead experts: {num_dead}\n")
    return 0 if all(s.is_good for s in scores) and num_dead == 0 else 1


def _hardware() -> str:
    """Returns the CPU's name, if Linux gives it, and the number of cores."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
        return f"{name}, {len(names) or 1} cores, no GPU"
    return name


if __name__ == "__main__":
    raise SystemExit(main())
