"""`moe-serve simulate`: predicts how a cluster would serve a workload, without the cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from moe_serve.cli.deadline_options import DeadlineOptions
from moe_serve.cli.options import option_values, with_options
from moe_serve.cli.simulate_options import SimulateOptions
from moe_serve.config.keys import parse_size
from moe_serve.errors import BenchError, ConfigError

if TYPE_CHECKING:
    from moe_serve.bench.workload.workload import Workload
    from moe_serve.simulate.layout import Layout
    from moe_serve.simulate.simulation import CellSettings


@with_options(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Predict how a cluster would serve a workload: latency, throughput and goodput.

    The server's own engines and schedulers run on a virtual clock; a cost model gives the time of
    each step. Give --model and --device for published hardware, or --calibration for this machine.
    """
    from moe_serve.bench.capacity import at_load, find_capacity
    from moe_serve.bench.figures.summary import Slo
    from moe_serve.bench.report.report_table import print_report
    from moe_serve.bench.simulated_run import SimulatedRun, run_simulation
    from moe_serve.cli.console import wide_console
    from moe_serve.cli.simulate_cells import check_cells, costs_of, first_layout, with_cells
    from moe_serve.simulate.layout import Layout
    from moe_serve.simulate.simulated_timeline import SimulatedTimeline

    out = options.report
    if out.save_requests and out.json is None:
        raise BenchError(
            "--save-requests needs --json FILE, the report into which the requests are written."
        )
    for path in (out.json, options.timeline):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"cannot write {path}: its folder does not exist.")
    cluster = options.cluster
    check_cells(options)
    costs, workload = costs_of(cluster), _workload(options)
    if options.cells.cells is None:
        layout = replace(
            Layout.parse(cluster.layout, cluster.devices, cluster.tensor_shards),
            num_redundant=cluster.redundant_experts,
        )
    else:
        layout = first_layout(options.cells)
    model = costs.of_layout(layout)
    run = SimulatedRun(
        model=model,
        settings=_settings(options, layout, workload, model.size.max_context),
        workload=workload,
        slo=None if out.slo is None else Slo.parse(out.slo),
        timeline=None if options.timeline is None else SimulatedTimeline(),
        is_strict=options.deadlines.strict,
    )
    if options.cells.cells is not None:
        run = with_cells(run, options.cells, costs)
    if options.of_capacity is not None:
        capacity = find_capacity(run)
        run = at_load(run, options.of_capacity, capacity)
        typer.echo(f"capacity: {capacity:.3f} requests/s in order of arrival", err=True)
    report = run_simulation(run)
    print_report(wide_console(), report)
    if options.timeline is not None and run.timeline is not None:
        run.timeline.write(options.timeline)
        typer.echo(f"timeline: {options.timeline}")
    if out.json is not None:
        report.write(out.json, has_records=out.save_requests)
        typer.echo(f"report: {out.json}")


def _settings(
    options: SimulateOptions, layout: Layout, workload: Workload, max_context: int
) -> CellSettings:
    from moe_serve.config.sections import SchedulerConfig
    from moe_serve.simulate.simulation import CellSettings

    engine, text = options.engine, options.cluster.memory_bytes
    deadlines = options.deadlines
    memory = None if text is None else int(text) if text.isdecimal() else parse_size(text)
    if text is not None and not memory:
        raise ConfigError(
            f"memory-bytes cannot be {text!r}: it takes a number of bytes, or a size such as 80GiB."
        )
    longest = engine.max_model_len
    if longest is None and options.cluster.calibration is None:
        longest = max((s.prompt_tokens + s.output_tokens for s in workload.slots()), default=2)
        longest = min(longest, max_context)
    return CellSettings(
        layout=layout,
        scheduler=SchedulerConfig(
            max_num_seqs=engine.max_num_seqs,
            max_batched_tokens=engine.max_batched_tokens,
            batch_policy=engine.batch_policy.value,
            tiers=() if workload.tiers is None else workload.tiers.tiers,
            order=deadlines.order.value,
            patience_s=deadlines.patience,
            max_wait_s=deadlines.max_wait,
            late=deadlines.late.value,
            preempt=deadlines.preempt.value,
            step_budget=deadlines.step_budget.value,
        ),
        page_size=engine.page_size,
        max_model_len=longest,  # None: the model's context, as a server has it
        memory_bytes=memory,
        num_pages=engine.num_pages,
        has_prefix_cache=engine.prefix_cache,
        micro_batches=engine.micro_batches,
        has_scatter=options.cluster.scatter,
    )


def _workload(options: SimulateOptions) -> Workload:
    """Reads the load. Without arrivals and a trace, all requests arrive at once."""
    from moe_serve.cli.bench.bench_plan import check_load, workload_of

    check_load(options.load)
    _check_deadlines(options)
    arrivals, trace = options.load.arrivals, options.load.trace.trace
    if arrivals.duration is not None and (
        arrivals.concurrency is not None or (arrivals.rate, trace) == (None, None)
    ):
        raise BenchError(
            "--duration only applies to --rate and --trace: leave it out, or give --requests "
            "instead."
        )
    workload = workload_of(options.load, options.seed, tiers=options.tiers.tiers)
    if workload.is_open and workload.arrivals is None and workload.trace is None:
        return replace(workload, concurrency=workload.num_requests)
    return workload


def _check_deadlines(options: SimulateOptions) -> None:
    """Refuses options that would do nothing."""
    if options.tiers.tiers is None:
        for name, value in option_values(options.deadlines).items():
            if name != "order" and value != getattr(DeadlineOptions(), name):
                raise BenchError(
                    f"--{name.replace('_', '-')} only applies with --tiers FILE: give --tiers, or "
                    "leave it out."
                )
    load = options.load
    if options.of_capacity is not None and (
        load.trace.trace is None
        or load.trace.scale_time != 1.0
        or (load.arrivals.rate, load.arrivals.concurrency) != (None, None)
    ):
        raise BenchError(
            "--load sets the speed of --trace FILE: leave out --scale-time, --rate and "
            "--concurrency."
        )
