"""Decides which tensors of a checkpoint are quantised, and how each is stored. Reads no weights.

Routers, norms, embeddings, biases and sinks are never quantised. All experts of a layer have one
storage, because no engine loads a layer whose experts differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.manifest import (
    Stored,
    attention_table,
    expert_table,
    feed_forward_table,
    model_table,
)
from moe_serve.model.checkpoint.tensor_names import ExpertNames, TensorNames
from moe_serve.model.spec import ModelSpec
from moe_serve.quantize.rounded_matrix import Shape, Storage

INT8_ROWS = Storage(bits=8, group=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseRules:
    """The storage of each kind of matrix; None keeps it as it is.

    `experts`: of routed experts. `int8_layers`: layers in which these are in int8 instead. `keep`:
    matrices whose module's name matches stay as they are.
    """

    experts: Storage
    attention: Storage | None = INT8_ROWS
    head: Storage | None = None
    int8_layers: frozenset[int] = frozenset()
    keep: str | None = None

    @property
    def dense(self) -> Storage:
        """The storage of shared experts and dense MLPs: that of attention, because transformers
        reads all matrices outside the routed experts alike.
        """
        return self.attention or self.head or self.experts

    def of_layer(self, layer: int) -> Storage:
        return replace(self.experts, bits=8) if layer in self.int8_layers else self.experts


@dataclass(frozen=True, slots=True)
class PlannedMatrix:
    """A matrix that will be stored in few bits as `name`, the name of its plain weight."""

    name: str
    shape: Shape
    storage: Storage

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class PlannedExpert:
    """A routed expert's matrices."""

    gate: PlannedMatrix
    up: PlannedMatrix
    down: PlannedMatrix

    @property
    def matrices(self) -> tuple[PlannedMatrix, PlannedMatrix, PlannedMatrix]:
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer:
    """The quantised parts of one layer. `mlp`: the shared expert or the dense MLP, by the keys of
    its table. `experts` is empty if the routed experts stay as they are.
    """

    attention: tuple[PlannedMatrix, ...]
    mlp: dict[str, PlannedMatrix]
    experts: tuple[PlannedExpert, ...]
    fused: tuple[Stored, ...] = ()  # gate_up and down, if the experts stay in these two tensors
    replaced: frozenset[str]  # stored tensors of the checkpoint that are not copied
    kept: tuple[str, ...]  # modules of matrices that stay as they are

    @property
    def of_experts(self) -> Iterator[PlannedMatrix]:
        for expert in self.experts:
            yield from expert.matrices

    @property
    def matrices(self) -> Iterator[PlannedMatrix]:
        yield from self.attention
        yield from self.mlp.values()
        yield from self.of_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisePlan:
    """The quantised parts of a model."""

    head: PlannedMatrix | None
    layers: tuple[PlannedLayer, ...]
    kept: tuple[str, ...] = field(default=())  # outside the layers

    @property
    def matrices(self) -> Iterator[PlannedMatrix]:
        if self.head is not None:
            yield self.head
        for layer in self.layers:
            yield from layer.matrices


def make_plan(
    spec: ModelSpec, names: TensorNames, experts: ExpertNames, rules: QuantiseRules
) -> QuantisePlan:
    """Plans a model whose routed experts are stored as `experts`. Raises ConfigError."""
    chooser = _Chooser(rules)
    layers = tuple(
        _plan_layer(spec, names, experts, layer, chooser) for layer in range(spec.num_layers)
    )
    head, kept = _plan_head(spec, names, chooser)
    plan = QuantisePlan(head=head, layers=layers, kept=kept)
    if not any(True for _ in plan.matrices):
        raise ConfigError("nothing is left to quantise: every matrix is kept (--keep).")
    return plan


class _Chooser:
    """Chooses a matrix's storage, and notes which modules are kept."""

    def __init__(self, rules: QuantiseRules) -> None:
        self.rules = rules
        self._keep = None if rules.keep is None else _compiled(rules.keep)

    def matrix(self, stored: Stored, storage: Storage | None) -> PlannedMatrix | None:
        """Returns the matrix, or None if it is kept. Raises ConfigError if groups do not divide."""
        module = stored.name.removesuffix(".weight")
        if storage is None or (self._keep is not None and self._keep.search(module)):
            return None
        num_rows, num_columns = stored.shape
        if storage.group and num_columns % storage.group:
            fitting = [str(size) for size in (32, 64, 128) if num_columns % size == 0]
            hint = (
                f"--group {' or '.join(fitting)} would" if fitting else "none of 32, 64, 128 does"
            )
            raise ConfigError(
                f"--group is {storage.group}, which does not divide the {num_columns} inputs of "
                f"{module}; {hint}. (--keep leaves out the modules that match a pattern.)"
            )
        return PlannedMatrix(stored.name, (num_rows, num_columns), storage)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"--keep is {pattern!r}, which is not a pattern: {error}.") from None


def _plan_layer(
    spec: ModelSpec, names: TensorNames, experts: ExpertNames, layer: int, chooser: _Chooser
) -> PlannedLayer:
    kept: list[str] = []
    replaced: set[str] = set()

    def choose(stored: Stored, storage: Storage | None) -> PlannedMatrix | None:
        matrix = chooser.matrix(stored, storage)
        if matrix is None:
            kept.append(stored.name.removesuffix(".weight"))
        else:
            replaced.add(stored.name)
        return matrix

    attention = [
        choose(stored, chooser.rules.attention)
        for stored in attention_table(names, spec, layer).values()
        if len(stored.shape) == 2
    ]
    mlp: dict[str, PlannedMatrix] = {}
    for key, stored in feed_forward_table(names, spec, layer).items():
        if key in ("router", "shared_gate"):
            kept.append(stored.name.removesuffix(".weight"))
        elif key.startswith(("shared.", "dense.")) and len(stored.shape) == 2:
            matrix = choose(stored, chooser.rules.dense)
            if matrix is not None:
                mlp[key.partition(".")[2]] = matrix
    fused = _fused(spec, experts, layer) if chooser.rules.experts.is_float else ()
    planned = _plan_experts(spec, names, layer, chooser, fused)
    if planned:
        replaced |= _stored_experts(spec, experts, layer)
    elif spec.layers[layer].is_sparse:
        stored = next(iter(expert_table(experts, spec, layer, 0).values()))
        kept.append(_experts_module(stored.name))
    return PlannedLayer(
        attention=tuple(matrix for matrix in attention if matrix is not None),
        mlp=mlp,
        experts=planned,
        fused=fused if planned else (),
        replaced=frozenset(replaced),
        kept=tuple(kept),
    )


def _plan_experts(
    spec: ModelSpec,
    names: TensorNames,
    layer: int,
    chooser: _Chooser,
    fused: tuple[Stored, ...],
) -> tuple[PlannedExpert, ...]:
    """Plans the routed experts, one by one also if the checkpoint stores them fused."""
    if not spec.layers[layer].is_sparse:
        return ()
    layout = _within(fused) if fused else _separate(names, spec)
    storage = chooser.rules.of_layer(layer)
    found: list[tuple[PlannedMatrix | None, ...]] = []
    for expert in range(spec.router.num_experts):
        table = expert_table(layout, spec, layer, expert)
        found.append(tuple(chooser.matrix(table[key], storage) for key in ("gate", "up", "down")))
    planned = [PlannedExpert(*each) for each in found if None not in each]  # type: ignore[arg-type]
    if planned and len(planned) < len(found) or any(None in each and any(each) for each in found):
        raise ConfigError(
            f"--keep is {chooser.rules.keep!r}, which keeps some routed experts of layer {layer} "
            "and not others: no engine loads such a layer; keep all of them, or none."
        )
    return tuple(planned)


def _within(fused: tuple[Stored, ...]) -> ExpertNames:
    """Returns names for the matrices of experts that stay fused: those of parts, not of tensors."""
    gate_up, down = (stored.name for stored in fused)
    return ExpertNames(
        gate=gate_up + ".{expert}.gate", up=gate_up + ".{expert}.up", down=down + ".{expert}"
    )


def _fused(spec: ModelSpec, experts: ExpertNames, layer: int) -> tuple[Stored, ...]:
    """Returns gate_up and down as GPT-OSS stores them. Raises ConfigError."""
    if not (experts.gate_up and experts.is_transposed and experts.is_interleaved):
        raise ConfigError(
            f"--scheme is 'mxfp4', which stores fused experts as GPT-OSS has them, but those of "
            f"{spec.family} are stored in another way: use --scheme w4a16."
        )
    table = expert_table(experts, spec, layer, 0)
    return table["gate_up"], table["down"]


def _separate(names: TensorNames, spec: ModelSpec) -> ExpertNames:
    """Returns the names under which experts are stored one by one. Raises ConfigError."""
    for layout in names.experts:
        if layout.gate:
            return layout
    raise ConfigError(
        f"routed experts of {spec.family} are stored in one tensor with their biases, which "
        "compressed-tensors cannot describe: use --scheme mxfp4."
    )


def _stored_experts(spec: ModelSpec, experts: ExpertNames, layer: int) -> set[str]:
    num = spec.router.num_experts if experts.gate else 1
    return {
        stored.name
        for expert in range(num)
        for stored in expert_table(experts, spec, layer, expert).values()
        if len(stored.shape) > 1 and not stored.name.endswith("_bias")
    }


def _experts_module(gate: str) -> str:
    """Converts `...mlp.experts.0.gate_proj.weight` to `...mlp.experts`."""
    stem, is_there, _ = gate.rpartition(".experts.")
    return stem + ".experts" if is_there else gate.removesuffix(".weight")


def _plan_head(
    spec: ModelSpec, names: TensorNames, chooser: _Chooser
) -> tuple[PlannedMatrix | None, tuple[str, ...]]:
    table = model_table(names, spec)
    if spec.is_head_tied:
        if chooser.rules.head is not None:
            raise ConfigError(
                "--head is 'w8', but this model's head is its embedding (tie_word_embeddings), "
                "which is not quantised: use --head keep."
            )
        return None, ("lm_head",)
    head = chooser.matrix(table["head"], chooser.rules.head)
    return head, () if head else (table["head"].name.removesuffix(".weight"),)


def storages(plan: QuantisePlan) -> Sequence[Storage]:
    """Returns the distinct storages of a plan, in order of appearance."""
    return tuple(dict.fromkeys(matrix.storage for matrix in plan.matrices))


def is_fused(plan: QuantisePlan) -> bool:
    """Returns whether experts stay in fused tensors (MXFP4)."""
    return any(layer.fused for layer in plan.layers)


def is_read_by_transformers(plan: QuantisePlan) -> bool:
    """Returns whether transformers 5 can read it: it knows one storage of routed experts, and one
    of all other matrices.
    """
    experts = {e.gate.storage for layer in plan.layers for e in layer.experts}
    dense = {m.storage for layer in plan.layers for m in (*layer.attention, *layer.mlp.values())}
    if plan.head is not None:
        dense.add(plan.head.storage)
    return len(experts) <= 1 and len(dense) <= 1
