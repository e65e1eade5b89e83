"""`moe-serve calibrate`: measures the costs of a model's stages on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moe_serve.cli.console import check_output, counted, wide_console
from moe_serve.cli.options import argument, option, with_options
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from moe_serve.pipeline.costs.cost_model import Line, LinkCosts
    from moe_serve.planning.calibration_file import Calibration

_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Options of `calibrate`."""

    model: str | None = argument(
        None,
        help="Folder of a checkpoint in Hugging Face layout, or the name of a model on a hub: "
        "OWNER/NAME or OWNER/NAME@REVISION. Default: the demonstration model.",
    )
    out: Path = option(Path("calibration.json"), help="JSON file for the measured times.")
    device: str = option(
        "auto", help="Device to measure: auto (cuda if there is a CUDA GPU, else cpu), cpu or cuda."
    )
    num_threads: int | None = option(
        None, min=1, help="Number of CPU threads that one rank would use. Default: torch chooses."
    )
    quick: bool = option(
        False,
        "--quick",
        help="Measure fewer points: this takes seconds instead of minutes, and is less accurate.",
    )
    layouts: str | None = option(
        None,
        show_default="one attention rank of 1, 2 and 4 processes, as far as there are cores and "
        "memory; none with --quick or on a GPU",
        help='Layouts whose ranks are started and measured on this machine, such as "1A2E, 2A2E '
        'tp2". `simulate` and `plan` predict these with the measured steps.',
    )


@with_options(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> None:
    """Measure how long attention, experts and transfers take on this machine.

    `moe-serve plan --calibration FILE` uses the measured times to compare layouts.
    """
    if options.device not in _DEVICES:
        raise ConfigError(f"device must be one of {', '.join(_DEVICES)}; got {options.device!r}.")
    out = options.out.expanduser()
    check_output(out)

    from moe_serve.config.sections import ModelConfig
    from moe_serve.engine.opened_model import model_folder
    from moe_serve.model.hub.named_model import local_model
    from moe_serve.planning.calibration import CalibrationRequest
    from moe_serve.planning.calibration import calibrate as measure
    from moe_serve.planning.calibration_file import write_calibration
    from moe_serve.planning.layout_fits import parse_layouts

    request = CalibrationRequest(
        folder=model_folder(ModelConfig(path=local_model(options.model))),
        device=options.device,
        num_threads=options.num_threads,
        is_quick=options.quick,
        layouts=None if options.layouts is None else parse_layouts(options.layouts),
    )
    console = Console(highlight=False, stderr=True)
    columns = (TextColumn("calibrating"), BarColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=1.0)
        done = measure(
            request, lambda what, share: bar.update(task, description=what, completed=share)
        )
    write_calibration(done, out)
    _print(done, out)


def _print(calibration: Calibration, out: Path) -> None:
    console = wide_console()
    machine, model = calibration.machine, calibration.model
    console.print(
        f"{model.name} ({model.family}, {model.dtype}) on {machine.device}, "
        f"{counted(machine.num_threads, 'thread')}, {machine.kernels}"
    )
    table = Table("stage", "seconds", "R\u00b2", "median error", "max error", box=None)
    formulas = dict(_formulas(calibration))
    for report in calibration.fits:
        table.add_row(
            report.name,
            formulas.get(report.name, ""),
            f"{report.r_squared:.3f}",
            f"{100 * report.median_error:.0f}%",
            f"{100 * report.max_error:.0f}%",
        )
    console.print(table)
    console.print(f"written to {out} after {calibration.seconds:.0f} s")


def _formulas(calibration: Calibration) -> list[tuple[str, str]]:
    """Returns the names of the fits and the formulas found, in microseconds."""
    from moe_serve.pipeline.costs.whole_step import FEW_ROWS

    costs, found = calibration.costs, []
    attention = [r.name for r in calibration.fits if r.name.startswith("T_a")]
    for name, layer in zip(attention, costs.layers, strict=False):
        a = layer.attention
        found.append(
            (
                name,
                f"{us(a.alpha_s)} + {us(a.row_s)}/row + {us(a.kv_token_s)}/key read "
                f"(+ {us(a.spill_s)} beyond {a.spill_tokens}) + {us(a.pair_s)}/pair",
            )
        )
        if layer.experts is not None:
            e = layer.experts
            text = f"{us(e.alpha_s)} + {us(e.choice_s)}/choice + {us(e.expert_s)}/active expert"
            found.append(("T_e experts", text))
    wholes = [] if costs.whole is None else [("whole steps", costs.whole)]
    for name, w in (*wholes, *((f"steps of {x.name}", x.whole) for x in costs.layouts)):
        text = (
            f"{us(w.alpha_s)} + {us(w.row_s)}/row + {us(w.kv_token_s)}/key read + "
            f"{us(w.pair_s)}/pair + {us(w.expert_s)}/active expert + {us(w.sequence_s)}/sequence"
        )
        few = [
            f"{us(each)}/row up to {k}"
            for k, each in zip(FEW_ROWS, w.few_rows_s, strict=False)
            if each
        ]
        found.append((name, " + ".join([text, *few])))
    for each in costs.sharded:
        a = each.attention
        text = f"{us(a.alpha_s)} + {us(a.row_s)}/row + {us(a.kv_token_s)}/key read + "
        name = f"T_a attention, {each.num_shards} processes"
        found.append((name, f"{text}{us(a.pair_s)}/pair"))
    for name, line, unit in (
        *_link_lines("", costs.link),
        *_link_lines(", gloo", calibration.network),
        ("schedule and head", costs.fixed, "sequence"),
        ("sampling", costs.sampling, "sequence"),
    ):
        found.append((name, f"{us(line.alpha_s)} + {us(line.beta_s)}/{unit}"))
    return found


def _link_lines(where: str, link: LinkCosts) -> list[tuple[str, Line, str]]:
    return [
        (f"exchange, attention rank{where}", link.attention, "byte"),
        (f"exchange, expert rank{where}", link.experts, "byte"),
        (f"T_c transfer{where}", link.transfer, "byte"),
    ]


def us(seconds: float) -> str:
    """Formats seconds as microseconds with three digits and without an exponent."""
    micro = 1e6 * seconds
    places = 0 if micro == 0 else max(0, 2 - math.floor(math.log10(abs(micro))))
    text = f"{micro:,.{places}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} \u00b5s"
