"""Lists the tensors of a model: the single table used for both checking and reading.

Shapes: D model width, V vocabulary, H heads, Hkv key/value heads, E experts, F expert width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_serve.model.checkpoint.tensor_names import ExpertNames, MLPNames, TensorNames, bias_of
from moe_serve.model.spec import ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor by its plain name and shape (a quantised checkpoint stores others in its place)."""

    name: str
    shape: Shape


Table = Mapping[str, Stored]


def model_table(names: TensorNames, spec: ModelSpec) -> Table:
    """Returns the tensors outside the layers: embedding, final_norm, head (unless it is the
    embedding).
    """
    table = {
        "embedding": Stored(names.embedding, (spec.vocab_size, spec.width)),
        "final_norm": Stored(names.final_norm, (spec.width,)),
    }
    if not spec.is_head_tied:
        table["head"] = Stored(names.head, (spec.vocab_size, spec.width))
    if spec.has_head_bias:
        table["head_bias"] = Stored(bias_of(names.head), (spec.vocab_size,))
    return table


def attention_table(names: TensorNames, spec: ModelSpec, layer: int) -> Table:
    """Returns a layer's attention and the norm before it, keyed by the fields of TensorNames."""
    shapes = _latent_shapes(spec) if spec.latent is not None else _grouped_shapes(spec, layer)
    shapes["attention_norm"] = (spec.width,)
    table = {}
    for key, shape in shapes.items():
        field = key.removesuffix("_bias")
        name = getattr(names, field)
        if name:
            table[key] = Stored(bias_of(name) if key != field else name, shape)
    return _in_layer(table, layer)


def _grouped_shapes(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    a, d = spec.layers[layer].attention, spec.width
    q, k, v = (
        heads * width
        for heads, width in (
            (a.num_heads, a.head_dim),
            (a.num_kv_heads, a.head_dim),
            (a.num_kv_heads, a.value_width),
        )
    )
    out = a.num_heads * a.value_width
    shapes: dict[str, Shape] = {"q": (q, d), "k": (k, d), "v": (v, d), "o": (d, out)}
    if spec.has_attention_bias:
        shapes |= {"q_bias": (q,), "k_bias": (k,), "v_bias": (v,)}
    if spec.has_output_bias:
        shapes["o_bias"] = (d,)
    if a.qk_norm != "none":
        is_row = a.qk_norm == "row"
        shapes["q_norm"] = (q if is_row else a.head_dim,)
        shapes["k_norm"] = (k if is_row else a.head_dim,)
    if a.has_sinks:
        shapes["sinks"] = (a.num_heads,)
    return shapes


def _latent_shapes(spec: ModelSpec) -> dict[str, Shape]:
    a, d = spec.latent, spec.width
    assert a is not None, "only for latent attention"
    q = a.num_heads * (a.nope_dim + a.rope_dim)
    compressed = a.latent_dim + a.rope_dim
    shapes: dict[str, Shape] = {
        "kv_a": (compressed, d),
        "kv_a_norm": (a.latent_dim,),
        "kv_b": (a.num_heads * (a.nope_dim + a.value_dim), a.latent_dim),
        "o": (d, a.num_heads * a.value_dim),
    }
    if a.query_rank is None:
        shapes["q"] = (q, d)
    else:
        shapes |= {"q_a": (a.query_rank, d), "q_a_norm": (a.query_rank,), "q_b": (q, a.query_rank)}
    if spec.has_attention_bias:
        shapes["kv_a_bias"] = (compressed,)
        if a.query_rank is not None:
            shapes["q_a_bias"] = (a.query_rank,)
    if spec.has_output_bias:
        shapes["o_bias"] = (d,)
    return shapes


def feed_forward_table(names: TensorNames, spec: ModelSpec, layer: int) -> Table:
    """Returns the norm, and the router and shared expert (shared.gate, ...) or the dense MLP
    (dense.).
    """
    d, num_experts = spec.width, spec.router.num_experts
    table = {"moe_norm": Stored(names.moe_norm, (d,))}
    if not spec.layers[layer].is_sparse:
        assert spec.dense_width is not None, "a dense layer needs dense_width"
        table |= _mlp_table(names.dense, "dense", d, spec.dense_width, spec.has_mlp_bias)
        return _in_layer(table, layer)
    table["router"] = Stored(names.router, (num_experts, d))
    if spec.router.has_bias:
        table["router_bias"] = Stored(names.router_bias, (num_experts,))
    if spec.router.has_selection_bias:
        table["selection_bias"] = Stored(names.selection_bias, spec.router.selection_bias_shape)
    if spec.shared is not None:
        table |= _mlp_table(names.shared, "shared", d, spec.shared.width, spec.has_mlp_bias)
        if spec.shared.has_gate:
            table["shared_gate"] = Stored(names.shared_gate, (1, d))
    return _in_layer(table, layer)


def _mlp_table(names: MLPNames, key: str, d: int, f: int, has_bias: bool) -> dict[str, Stored]:
    shapes: dict[str, Shape] = {"gate": (f, d), "up": (f, d), "gate_up": (2 * f, d), "down": (d, f)}
    table = {}
    for part, shape in shapes.items():
        name = getattr(names, part)
        if name:
            table[f"{key}.{part}"] = Stored(name, shape)
            if has_bias:
                table[f"{key}.{part}_bias"] = Stored(bias_of(name), shape[:1])
    return table


def expert_table(names: ExpertNames, spec: ModelSpec, layer: int, expert: int) -> Table:
    """Returns one expert: gate, up and down, or gate_up and down.

    Fused tensors have their whole shape.
    """
    d, f, e = spec.width, spec.expert_width, spec.router.num_experts
    if names.gate:
        return {
            "gate": Stored(names.gate.format(layer=layer, expert=expert), (f, d)),
            "up": Stored(names.up.format(layer=layer, expert=expert), (f, d)),
            "down": Stored(names.down.format(layer=layer, expert=expert), (d, f)),
        }
    swap = names.is_transposed
    table = {
        "gate_up": Stored(names.gate_up, (e, d, 2 * f) if swap else (e, 2 * f, d)),
        "down": Stored(names.down, (e, f, d) if swap else (e, d, f)),
    }
    if spec.has_expert_bias:
        table["gate_up_bias"] = Stored(names.gate_up_bias, (e, 2 * f))
        table["down_bias"] = Stored(names.down_bias, (e, d))
    return _in_layer(table, layer)


def all_tensors(names: TensorNames, experts: ExpertNames, spec: ModelSpec) -> Iterator[Stored]:
    """Yields every tensor once, in the order of a forward pass."""
    yield from model_table(names, spec).values()
    for layer in range(spec.num_layers):
        yield from layer_tensors(names, experts, spec, layer)


def layer_tensors(
    names: TensorNames, experts: ExpertNames, spec: ModelSpec, layer: int
) -> Iterator[Stored]:
    """Yields every tensor of a layer once."""
    yield from attention_table(names, spec, layer).values()
    yield from feed_forward_table(names, spec, layer).values()
    if spec.layers[layer].is_sparse:
        for expert in range(spec.router.num_experts if experts.gate else 1):
            yield from expert_table(experts, spec, layer, expert).values()


def _in_layer(table: Table, layer: int) -> Table:
    return {key: Stored(s.name.format(layer=layer), s.shape) for key, s in table.items()}
