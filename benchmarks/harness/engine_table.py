"""The table of `engine.py`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from .machine import MachineLimits
from .model_size import ModelSize
from .roofline import Roofline
from .work import Figures
from .worker import Result

_WIDTH = 124  # columns; more if the terminal has more
_ROWS = (
    ("TTFT, alone (ms)", "ttft_s", 1e3),
    ("single decode (tok/s)", "single_decode_tok_s", 1.0),
    ("batch with prompts (tok/s)", "batch_total_tok_s", 1.0),
    ("batch decode (tok/s)", "batch_decode_tok_s", 1.0),
    ("prefill (tok/s)", "prefill_tok_s", 1.0),
)


def print_tables(
    name: str, size: ModelSize, machine: MachineLimits, limits: Roofline, results: list[Result]
) -> None:
    """One row per figure: the limit, ours with its fraction of it, the peer's best, the ratio."""
    console = Console(width=max(_WIDTH, Console().width))
    console.print(
        f"{name}: {size.num_parameters / 1e6:,.1f} M parameters, {size.dtype}; "
        f"{machine.num_threads} threads: reads {machine.read_gb_s:.1f} GB/s, "
        f"GEMM {machine.gemm_bf16_gflop_s:,.0f} GFLOP/s bf16, "
        f"{machine.gemm_fp32_gflop_s:,.0f} GFLOP/s fp32"
    )
    done = [r for r in results if r.figures is not None]
    own = next((r for r in done if r.engine == "moe-serve"), None)
    peers = [r for r in done if r is not own]
    table = Table()
    for name in ("", "limit", "moe-serve", "of limit", "best peer", "which", "ratio"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for label, key, scale in _ROWS:
        table.add_row(*_figure_row(label, key, scale, limits, own, peers))
    for label, key in (("load (s)", "load_s"), ("peak memory (MiB)", "peak_rss_mib")):
        table.add_row(label, "", *_cost_row(key, own, peers))
    console.print(table)
    for result in results:
        if result.error:
            console.print(f"{result.engine} failed: {result.error}", markup=False)
    for peer in peers:
        if own is not None:
            console.print(f"{peer.engine}: {_agreement(own, peer)}")


def _figure_row(
    label: str, key: str, scale: float, limits: Roofline, own: Result | None, peers: list[Result]
) -> list[str]:
    is_time = key == "ttft_s"
    limit: float = getattr(limits, key)
    mine = _figure(own, key)
    best = (min if is_time else max)(peers, key=lambda r: _figure(r, key) or 0.0, default=None)
    theirs = _figure(best, key)
    fraction = ratio = ""
    if mine:
        fraction = f"{100 * (limit / mine if is_time else mine / limit):.0f}%"
    if mine and theirs:
        ratio = f"{theirs / mine if is_time else mine / theirs:.2f}x"
    return [
        label,
        f"{limit * scale:,.1f} ({limits.limited_by[key]})",
        _shown(mine, scale),
        fraction,
        _shown(theirs, scale),
        best.engine.partition("/")[2] if best else "",
        ratio,
    ]


def _cost_row(key: str, own: Result | None, peers: list[Result]) -> list[str]:
    best = min(peers, key=lambda r: float(getattr(r, key)), default=None)
    mine = float(getattr(own, key)) if own else None
    theirs = float(getattr(best, key)) if best else None
    ratio = f"{theirs / mine:.2f}x" if mine and theirs else ""
    which = best.engine.partition("/")[2] if best else ""
    return [_shown(mine, 1.0), "", _shown(theirs, 1.0), which, ratio]


def _figure(result: Result | None, key: str) -> float | None:
    figures: Figures | None = result.figures if result else None
    return float(getattr(figures, key)) if figures else None


def _shown(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:,.1f}"


def _agreement(own: Result, peer: Result) -> str:
    """Same work? Compares the batch's answers: first tokens, and all of them."""
    assert own.figures and peer.figures, "only finished results are compared"
    pairs = list(zip(own.figures.first_answers, peer.figures.first_answers, strict=True))
    same_first = sum(a[0] == b[0] for a, b in pairs)
    same_all = sum(a == b for a, b in pairs)
    return f"same first token {same_first} of {len(pairs)}, whole answer {same_all} of {len(pairs)}"
