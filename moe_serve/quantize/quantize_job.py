"""Quantises a checkpoint: plans, rounds layer by layer, writes and measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_serve.engine.memory.free_memory import free_bytes
from moe_serve.errors import ConfigError
from moe_serve.json_text import parse_json
from moe_serve.learn.documents import TextPiece
from moe_serve.model.checkpoint.checkpoint import Checkpoint
from moe_serve.model.checkpoint.checkpoint_writer import (
    CheckpointWriter,
    check_target,
    files_beside,
)
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.safetensors_writer import PlannedTensor
from moe_serve.model.families import family_of
from moe_serve.model.load.load_experts import expert_names
from moe_serve.model.load.weight_reader import open_checkpoint
from moe_serve.quantize.comparison import Comparison, DomainFigures
from moe_serve.quantize.expert_calibration import POOL, ExpertReport, GptqSettings
from moe_serve.quantize.layer_quantizer import LayerQuantizer, RoundedLayer
from moe_serve.quantize.layer_runs import HiddenStates, make_batches
from moe_serve.quantize.quantise_plan import PlannedMatrix, QuantisePlan, QuantiseRules, make_plan
from moe_serve.quantize.quantise_texts import QuantiseTexts, read_texts
from moe_serve.quantize.quantization_config import quantization_config
from moe_serve.quantize.rounded_matrix import MXFP4, RoundedMatrix, mxfp4_parts
from moe_serve.quantize.sensitivity import int8_layers, layer_divergences
from moe_serve.text.tokenizer import Tokenizer

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseJob:
    """The options of one run of `quantize`.

    `texts`: files to calibrate and measure on; without them nothing is measured. `held_out`: files
    to measure on instead of a part of these. `int8_budget`: the
    divergence, in nats a token, that layers in few bits may add up to; the others are in int8.
    """

    folder: Path
    out: Path
    rules: QuantiseRules
    is_gptq: bool
    texts: tuple[Path, ...] = ()
    held_out: tuple[Path, ...] = ()
    num_tokens: int = 131_072
    num_held_out: int = 16_384
    int8_budget: float | None = None
    is_pooled: bool = True
    num_threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseOutcome:
    """The result: the figures for the report and the model card."""

    job: QuantiseJob
    plan: QuantisePlan
    int8_layers: frozenset[int]
    divergences: Sequence[float]
    num_calibration_tokens: Mapping[str, int]  # by domain
    experts: Sequence[Sequence[ExpertReport]]  # by layer; empty without calibration
    rerouted: Sequence[float | None]  # by layer
    domains: Sequence[DomainFigures]
    bytes_before: int
    bytes_after: int
    seconds: float


class CheckpointSource:
    """The opened checkpoint that is quantised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = HFConfig.read(self.folder)
        if (stored := self.config.quantization()) is not None:
            raise ConfigError(
                f"{self.folder} is quantised already ({stored.get('quant_method')!r}): give the "
                "checkpoint that it was made from, with weights in floats."
            )
        family = family_of(self.config)
        text = self.config.text()
        self.spec = family.read_spec(text)
        self._reader = open_checkpoint(self.folder, text)
        self.names = family.names_in(self._reader.has)
        self.experts = expert_names(self.names, self.spec, self._reader)
        self.checkpoint = Checkpoint(self.folder)

    def plan(self, rules: QuantiseRules) -> QuantisePlan:
        return make_plan(self.spec, self.names, self.experts, rules)

    @property
    def num_bytes(self) -> int:
        headers = (self.checkpoint.header(name) for name in self.checkpoint)
        return sum(header.end - header.begin for header in headers)


def quantise(job: QuantiseJob, progress: Progress, finish: FinishFiles) -> QuantiseOutcome:
    """Quantises a checkpoint. Raises ConfigError or CheckpointError before anything is written, and
    leaves nothing behind if it fails. `finish` makes the report and the model card.
    """
    started = time.monotonic()
    check_target(job.out)
    source = CheckpointSource(job.folder)
    plan = source.plan(job.rules)
    texts = _texts(job, source)
    max_positions = min(source.spec.max_positions, 1024)
    quantizer = LayerQuantizer(job.folder, job.num_threads, max_positions)
    _check_memory(job, source, quantizer.base.dtype)
    divergences: Sequence[float] = ()
    if job.int8_budget is not None:
        assert texts is not None, "the options demand texts for a budget"

        def measured(layer: int) -> None:
            progress(f"layer {layer} measured alone", 0.3 * (layer + 1) / len(plan.layers))

        divergences = layer_divergences(quantizer, plan, texts.held_out, measured)
        rules = replace(job.rules, int8_layers=int8_layers(divergences, job.int8_budget))
        job = replace(job, rules=rules)
        plan = source.plan(rules)
    run = _Run(job, source, plan, quantizer, texts, progress)
    with CheckpointWriter(job.out, list(run.planned_tensors())) as writer:
        run.write_all(writer)
        outcome = run.outcome(divergences, time.monotonic() - started)
        values = dict(parse_json((job.folder / "config.json").read_bytes()))
        modules = [name.removesuffix(".weight") for name in run.beside()]
        values["quantization_config"] = quantization_config(plan, modules)
        writer.finish(values, {**files_beside(job.folder), **finish(outcome)})
    return outcome


FinishFiles = Callable[[QuantiseOutcome], Mapping[str, bytes]]


def _texts(job: QuantiseJob, source: CheckpointSource) -> QuantiseTexts | None:
    if not job.texts:
        return None
    return read_texts(
        job.texts,
        Tokenizer.load(job.folder),
        held_out_paths=job.held_out,
        num_tokens=job.num_tokens if job.is_gptq else 0,
        num_held_out=job.num_held_out,
        max_piece=source.spec.max_positions,
        seed=job.seed,
    )


def _check_memory(job: QuantiseJob, source: CheckpointSource, dtype: torch.dtype) -> None:
    """Refuses a model of which one layer and the texts' states do not fit into free memory."""
    spec = source.spec
    expert = 3 * spec.width * spec.expert_width
    layer = spec.router.num_experts * expert
    width = max(spec.width, spec.expert_width)
    needed = layer * (2 * dtype.itemsize + 1) + 8 * expert + 4 * 8 * width**2
    if job.texts:
        needed += spec.vocab_size * (3 * 4 * 256 + 2 * spec.width * dtype.itemsize)
        tokens = 2 * job.num_held_out + (3 * job.num_tokens if job.is_gptq else 0)
        needed += tokens * spec.width * dtype.itemsize
    free = free_bytes(torch.device("cpu"))
    if needed > free:
        raise ConfigError(
            f"quantising {job.folder} needs about {needed / 1e9:.1f} GB for one layer and the "
            f"states of the texts, but {free / 1e9:.1f} GB of memory are free: lower --tokens "
            f"(now {job.num_tokens}), use --method rtn, or free some memory."
        )


class _Run:
    """Takes the layers one by one: rounds, writes, and carries the texts along."""

    def __init__(
        self,
        job: QuantiseJob,
        source: CheckpointSource,
        plan: QuantisePlan,
        quantizer: LayerQuantizer,
        texts: QuantiseTexts | None,
        progress: Progress,
    ) -> None:
        self._job, self._source, self._plan = job, source, plan
        self._quantizer, self._texts, self._progress = quantizer, texts, progress
        self._dtype = quantizer.base.dtype
        replaced = {name for layer in plan.layers for name in layer.replaced}
        if plan.head is not None:
            replaced.add(plan.head.name)
        self._copied = [name for name in source.checkpoint if name not in replaced]
        self._reports: list[Sequence[ExpertReport]] = []
        self._rerouted: list[float | None] = []
        self._domains: list[DomainFigures] = []

    def planned_tensors(self) -> Iterator[PlannedTensor]:
        """Yields everything that will be written, in the order of the files."""
        for name in self._copied:
            tensor = self._source.checkpoint.view(name)
            yield PlannedTensor(name, tensor.dtype, tuple(tensor.shape))
        fused = {m.name for layer in self._plan.layers if layer.fused for m in layer.of_experts}
        for matrix in self._plan.matrices:
            if matrix.name not in fused:
                yield from matrix.storage.planned(matrix.name, matrix.shape, self._dtype)
        for layer in self._plan.layers:
            for stored in layer.fused:
                num_experts, num_inputs, num_outputs = stored.shape
                grid = (num_experts, num_outputs, num_inputs // MXFP4.group)
                blocks = (*grid, MXFP4.group // 2)
                yield PlannedTensor(f"{stored.name}_blocks", torch.uint8, blocks)
                yield PlannedTensor(f"{stored.name}_scales", torch.uint8, grid)

    def beside(self) -> list[str]:
        """Returns the names of copied matrices that do not belong to the model itself."""
        own = {module for layer in self._plan.layers for module in layer.kept}
        own |= set(self._plan.kept)
        checkpoint = self._source.checkpoint
        return [
            name
            for name in self._copied
            if name.endswith(".weight")
            and len(checkpoint.header(name).shape) >= 2
            and name.removesuffix(".weight") not in own
            and name != self._source.names.embedding
            and not any(name.startswith(f"{module}.") for module in own)
        ]

    def write_all(self, writer: CheckpointWriter) -> None:
        for name in self._copied:
            writer.write(name, [self._source.checkpoint.view(name)])
            self._source.checkpoint.drop(name)
        loader = self._quantizer.base
        if self._plan.head is not None:
            head = self._quantizer.head(self._plan.head)
            _write(writer, self._plan.head, head)
        states, settings, comparison = self._prepared()
        num_layers = len(self._plan.layers)
        for layer, planned in enumerate(self._plan.layers):
            self._progress(f"layer {layer} of {num_layers}", 0.3 + 0.65 * layer / num_layers)
            result = self._quantizer.round(layer, planned, states, settings)
            _write_layer(writer, result)
            self._reports.append(result.experts)
            if comparison is not None:
                comparison.pass_layer(result)
        self._progress("logits", 0.95)
        if comparison is not None:
            if self._plan.head is not None:
                loader = self._quantizer.with_head(self._plan.head.name, head)
            self._rerouted = comparison.rerouted
            self._domains = comparison.figures(loader)

    def _prepared(self) -> tuple[HiddenStates | None, GptqSettings | None, Comparison | None]:
        if self._texts is None:
            return None, None, None
        comparison = Comparison(self._quantizer, self._texts.held_out)
        if not self._job.is_gptq:
            return None, None, comparison
        batches = make_batches([piece.tokens for piece in self._texts.calibration])
        states = HiddenStates.embed(self._quantizer.base, batches)
        pool = POOL if self._job.is_pooled else 0.0
        settings = GptqSettings(self._dtype, pool=pool, seed=self._job.seed)
        return states, settings, comparison

    def outcome(self, divergences: Sequence[float], seconds: float) -> QuantiseOutcome:
        pieces: Sequence[TextPiece] = ()
        if self._texts is not None and self._job.is_gptq:
            pieces = self._texts.calibration
        by_label: dict[str, int] = {}
        for piece in pieces:
            by_label[piece.label] = by_label.get(piece.label, 0) + len(piece.tokens)
        return QuantiseOutcome(
            job=self._job,
            plan=self._plan,
            int8_layers=self._job.rules.int8_layers,
            divergences=divergences,
            num_calibration_tokens=by_label,
            experts=self._reports,
            rerouted=self._rerouted,
            domains=self._domains,
            bytes_before=self._source.num_bytes,
            bytes_after=sum(tensor.nbytes for tensor in self.planned_tensors()),
            seconds=seconds,
        )


def _write_layer(writer: CheckpointWriter, result: RoundedLayer) -> None:
    planned, matrices = result.planned, result.matrices
    fused = set(planned.of_experts) if planned.fused else set()
    for matrix in planned.matrices:
        if matrix not in fused:
            _write(writer, matrix, matrices[matrix.name])
    if not planned.fused:
        return
    gate_up, down = planned.fused
    parts: dict[str, list[Tensor]] = {}
    for expert in planned.experts:
        gate, up, of_down = (matrices[matrix.name] for matrix in expert.matrices)
        for stored, rows in ((gate_up, [gate, up]), (down, [of_down])):
            blocks, scales = mxfp4_parts(rows)
            parts.setdefault(f"{stored.name}_blocks", []).append(blocks)
            parts.setdefault(f"{stored.name}_scales", []).append(scales)
    for name, pieces in parts.items():
        writer.write(name, pieces)


def _write(writer: CheckpointWriter, matrix: PlannedMatrix, rounded: RoundedMatrix) -> None:
    for name, tensor in rounded.stored(matrix.name):
        writer.write(name, [tensor])
