"""Shows stage by stage where the memory of a loading server goes, as the kernel counts it.

    python benchmarks/run.py load_memory build/random-1b-int4

Each line is a reading of /proc/self/status after a stage: what is resident, the part of it that
belongs to this process alone, the pages of files and libraries, and the peak so far. Nothing of
the checkpoint is held twice if the peak after a stage is no more than what is resident then.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.model_size import read_stored_bytes
from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import CacheConfig
from moe_serve.model.load.loader import ModelLoader

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Sizes in bytes."""

    resident: int
    private: int  # RssAnon
    files: int  # RssFile: libraries, and pages of the checkpoint that are mapped
    peak: int  # of `resident`


def main() -> int:
    arguments = _parser().parse_args()
    stored = read_stored_bytes(arguments.model).total
    _print(f"checkpoint {stored / _MIB:.0f} MiB")
    began = _note("interpreter and imports")
    loader = ModelLoader(
        arguments.model, num_threads=arguments.threads, low_bit_products=arguments.products
    )
    _note("headers")
    experts = loader.expert_stage()
    _note("experts")
    stage = loader.attention_stage(arguments.context)
    loaded = _note("attention, embedding, head")
    page_size = CacheConfig().page_size
    num_pages = 1 + arguments.tokens // page_size
    cache = KVCache(loader.spec, num_pages, page_size, loader.dtype, torch.device("cpu"))
    gc.collect()
    _note(f"KV cache of {arguments.tokens} tokens")
    grown = loaded.private - began.private
    _print(
        f"the weights take {grown / stored:.2f} of the checkpoint; while they were loaded, the "
        f"peak was {(loaded.peak - loaded.resident) / _MIB:.1f} MiB above what is resident now"
    )
    del experts, stage, cache
    return 0


def read_memory() -> Reading:
    """Reads the kernel's counts of this process."""
    status = Path("/proc/self/status").read_text("ascii")
    found = dict(re.findall(r"^(VmRSS|RssAnon|RssFile|VmHWM):\s+(\d+) kB$", status, re.M))
    resident, private, files, peak = (
        1024 * int(found[name]) for name in ("VmRSS", "RssAnon", "RssFile", "VmHWM")
    )
    return Reading(resident=resident, private=private, files=files, peak=peak)


def _note(stage: str) -> Reading:
    reading = read_memory()
    _print(
        f"{stage:28} resident {reading.resident / _MIB:8.1f} MiB: {reading.private / _MIB:8.1f} "
        f"private, {reading.files / _MIB:7.1f} of files; peak {reading.peak / _MIB:8.1f}"
    )
    return reading


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint folder in Hugging Face layout")
    parser.add_argument("--products", choices=("exact", "int8"), default="exact")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=2048, help="room of the KV cache")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser
