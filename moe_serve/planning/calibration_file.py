"""A calibration on disk: JSON with a schema version, and the model and machine measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from moe_serve.errors import ConfigError, shortened
from moe_serve.pipeline.costs.cost_model import Line, LinkCosts, StageCosts
from moe_serve.regular_file import regular_file

SCHEMA = 3
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedModel:
    """The measured checkpoint. Bytes are those of the weights as loaded; `identity` is
    hexadecimal."""

    name: str
    identity: str
    family: str
    dtype: str
    num_layers: int
    max_context: int
    attention_bytes: int  # everything but the routed experts
    expert_bytes: int  # all routed experts
    kv_token_bytes: int  # one token in the KV cache, all layers
    num_kv_parts: int = 1  # among which processes of an attention rank can divide it


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The measured device: one GPU, or `num_threads` threads of a CPU."""

    host: str
    device: str
    num_threads: int
    kernels: str
    torch: str
    moe_serve: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """The quality of a linear fit of its measurements. Errors are relative."""

    name: str
    num_samples: int
    r_squared: float
    median_error: float
    max_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCosts:
    """The time that HTTP costs, for streams to a client on the same machine.

    request: seconds by the number of prompt tokens. They go from sending a request until the engine
        has it, and contain the way of its first token back to the client.
    begin_s: seconds that the engine loses when a request begins.
    chunk_s: seconds between the chunks of two streams in the same step.
    step: seconds that the engine loses in a step, by the number of its sequences.
    """

    request: Line
    begin_s: float
    chunk_s: float
    step: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measurements of `moe-serve calibrate`. `network` is the link between ranks of different
    hosts, as far as one machine can measure it: gloo over loopback. `costs` has the link within one
    host, and steps without HTTP; `http` is None if that was not measured."""

    schema: int
    model: CalibratedModel
    machine: MachineFacts
    costs: StageCosts
    network: LinkCosts
    fits: tuple[FitReport, ...]
    seconds: float  # duration of the measurements
    http: HttpCosts | None = None


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Writes the file; raises ConfigError if it cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=2)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the calibration {path}: {error.strerror}.") from error


def read_calibration(path: Path) -> Calibration:
    """Reads the file; raises ConfigError if it, its schema or a field of it is wrong."""
    try:
        with regular_file(path).open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the calibration {path}: {error.strerror}.") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path} is not a calibration: it is larger than {_MAX_BYTES} bytes.")
    try:
        head = msgspec.json.decode(text)
        if not isinstance(head, dict) or "schema" not in head:
            raise ConfigError(
                f"{path} is not a calibration: moe-serve calibrate --out FILE writes one."
            )
        schema = head["schema"]
        if schema != SCHEMA:
            raise ConfigError(
                f"{path} has calibration schema {shortened(repr(schema))}, but this version reads "
                f"{SCHEMA}: run moe-serve calibrate again."
            )
        calibration = msgspec.json.decode(text, type=Calibration)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a calibration: {error}.") from error
    _check(calibration, path)
    return calibration


def _check(calibration: Calibration, path: Path) -> None:
    """Checks the rules that the types do not express."""
    costs = calibration.costs
    numbers = [costs.fixed, costs.sampling]
    for link in (costs.link, calibration.network):
        numbers += [link.attention, link.experts, link.transfer]
    seconds = [number for line in numbers for number in (line.alpha_s, line.beta_s)]
    stages = [layer.attention for layer in costs.layers]
    for a in (*stages, *(each.attention for each in costs.sharded)):
        seconds += [a.alpha_s, a.row_s, a.kv_token_s, a.pair_s, a.spill_s]
    for layer in costs.layers:
        if (e := layer.experts) is not None:
            seconds += [e.alpha_s, e.choice_s, e.expert_s]
    seconds += [each.machine_share for each in costs.layouts]
    if (http := calibration.http) is not None:
        lines = (http.request, http.step)
        seconds += [number for line in lines for number in (line.alpha_s, line.beta_s)]
        seconds += [http.begin_s, http.chunk_s]
    for whole in (costs.whole, *(each.whole for each in costs.layouts)):
        if whole is not None:
            seconds += [whole.alpha_s, whole.row_s, whole.kv_token_s, whole.pair_s]
            seconds += [whole.expert_s, whole.sequence_s, *whole.few_rows_s, *whole.scatter]
    experts = costs.experts
    is_sound = (
        min(seconds) >= 0
        and costs.layers
        and sum(layer.num_layers for layer in costs.layers) == calibration.model.num_layers
        and 0 < experts.top_k <= experts.num_effective <= experts.num_experts
    )
    if not is_sound:
        raise ConfigError(
            f"{path} is not a calibration: it has negative times, or numbers of layers or experts "
            "that contradict each other; run moe-serve calibrate again."
        )
