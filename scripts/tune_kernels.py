"""Searches the fastest tiles of the grouped products on this GPU, and keeps those that are faster
than the heuristics' choice.

    python scripts/tune_kernels.py                        search and print
    python scripts/tune_kernels.py --write                also write kernels/moe_kernels/gpu/tuned/
    python scripts/tune_kernels.py --layers olmoe --dry-run --capability 90

`--dry-run` lists the tiles to try, and needs no GPU. A table is for one device and one version of
triton. With `--write` it is written after each product, and a later run continues after the last
one (`--again` starts anew). A product whose fastest tiles are the heuristics' choice has an empty
entry.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import triton

from kernel_tuning.candidates import candidates
from kernel_tuning.search import DeviceMeasure, Entries, products, tune_layer
from moe_kernels.gpu.compile_case import TARGETS
from moe_kernels.gpu.expert_layers import EXPERT_LAYERS, ExpertLayerSizes
from moe_kernels.gpu.grouped_gemm.api import chip_of
from moe_kernels.gpu.tuned import TunedTable, load_tuned, minor_version


def main() -> int:
    arguments = parse_arguments()
    layers = [layer for layer in EXPERT_LAYERS if layer.name in arguments.layers]
    if arguments.dry_run:
        list_candidates(layers, arguments.capability)
        return 0
    if not torch.cuda.is_available():
        print("there is no CUDA device to tune for; --dry-run lists candidates", file=sys.stderr)
        return 1
    chip = chip_of(torch.device("cuda"), has_equal_tiles=True)
    device = torch.cuda.get_device_name()
    before = load_tuned(device, triton.__version__).entries
    known: Entries = {} if arguments.again else {key: dict(e) for key, e in before.items()}

    def keep(key: str, entry: dict[str, int]) -> None:
        known[key] = entry
        if arguments.write:
            merged(device, {key: entry}).write()

    for layer in layers:
        tune_layer(layer, chip.capability, DeviceMeasure(chip), say, known=known, keep=keep)
    say(f"{sum(map(bool, known.values()))} tiles beat the heuristics")
    return 0


def say(text: str) -> None:
    print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tune the grouped products for this GPU.")
    names = [layer.name for layer in EXPERT_LAYERS]
    parser.add_argument("--layers", nargs="+", choices=names, default=names)
    parser.add_argument("--write", action="store_true", help="keep the table for this device")
    parser.add_argument("--again", action="store_true", help="tune finished products again")
    parser.add_argument("--dry-run", action="store_true", help="list configurations, run none")
    parser.add_argument("--capability", type=int, choices=TARGETS, default=90, help="for --dry-run")
    return parser.parse_args()


def merged(device: str, entries: Entries) -> TunedTable:
    """Merge earlier and new results; only the requested layers are new."""
    before = load_tuned(device, triton.__version__)
    return TunedTable(
        device=device,
        triton=minor_version(triton.__version__),
        entries={**before.entries, **entries},
    )


def list_candidates(layers: Sequence[ExpertLayerSizes], capability: int) -> None:
    total = 0
    for layer in layers:
        for item in products(layer):
            count = len(list(candidates(item.shape, item.block_m, capability)))
            print(f"{layer.name:24} {item.key:48} {count:4} tiles")
            total += count
    print(f"{total} tiles on sm_{capability}")


if __name__ == "__main__":
    sys.exit(main())
