"""Describes a model in numbers. The runtime knows nothing else about an architecture.

A family (`model/families/`) makes it from a Hugging Face config; no other code knows a model's
name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moe_kernels.interface.attention_shape import AttentionShape, LatentShape
from moe_kernels.interface.kernels import GatedActivation
from moe_kernels.interface.kv_form import FLOATS, KVForm
from moe_kernels.interface.routing import RouterShape
from moe_serve.model.rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The properties in which layers differ. `is_sparse` layers have routed experts instead of one
    dense MLP.

    `rope`: None means the model's; another one differs in its frequencies, not in its pairs.
    """

    attention: AttentionShape
    is_sparse: bool = True
    has_rotation: bool = True
    rope: RopeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The router of every sparse layer.

    `is_weighing_inputs`: the single chosen expert's weight multiplies its input (Llama 4).
    """

    shape: RouterShape
    has_bias: bool = False  # added to the logits
    has_selection_bias: bool = False  # affects the choice only
    is_weighing_inputs: bool = False
    has_row_of_selection_bias: bool = False  # stored as [1, E] (ERNIE), not as [E]

    @property
    def selection_bias_shape(self) -> tuple[int, ...]:
        return (1, self.num_experts) if self.has_row_of_selection_bias else (self.num_experts,)

    @property
    def num_experts(self) -> int:
        return self.shape.num_experts

    @property
    def top_k(self) -> int:
        return self.shape.top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSpec:
    """An MLP that every token passes; `has_gate`: its output is multiplied by the sigmoid of its
    own logit.
    """

    width: int
    has_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTemperature:
    """Scales queries by their position p: 1 + scale * ln(1 + floor((p + shift) / floor_scale))
    (Nakanishi, Scalable-Softmax, 2025).

    It applies to layers without rotation; with latent attention, to all layers.
    """

    scale: float
    floor_scale: float
    shift: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder whose layers each have attention, then experts or a dense MLP.

    If `latent` is set, attention is multi-head latent attention, and each layer's `attention` is
    its absorbed shape.
    """

    family: str
    vocab_size: int
    width: int
    layers: tuple[LayerSpec, ...]
    expert_width: int
    dense_width: int | None = None  # of dense layers
    shared: SharedExpertSpec | None = None
    activation: GatedActivation = field(default_factory=GatedActivation)
    has_expert_bias: bool = False
    has_mlp_bias: bool = False  # of shared experts and dense layers
    latent: LatentShape | None = None
    has_attention_bias: bool = False  # of q, k and v
    has_output_bias: bool = False
    has_head_bias: bool = False
    router: RouterSpec
    rope: RopeSpec
    query_temperature: QueryTemperature | None = None
    norm_eps: float
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    is_head_tied: bool
    max_positions: int
    dtype: Literal["float32", "bfloat16", "float16"] | None  # None: the embedding's stored dtype
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_sparse_layers(self) -> int:
        """The number of layers with routed experts."""
        return sum(layer.is_sparse for layer in self.layers)

    @property
    def attention(self) -> AttentionShape:
        """The first layer's attention: heads and widths are the same in all layers."""
        return self.layers[0].attention

    @property
    def window(self) -> int | None:
        """Number of last tokens that any layer looks at; None: some layer looks at all."""
        windows = [layer.attention.sliding_window for layer in self.layers]
        return max((w for w in windows if w), default=None) if all(windows) else None

    def rope_of(self, layer: int) -> RopeSpec:
        return self.layers[layer].rope or self.rope

    @property
    def kv_values_per_token(self) -> int:
        """Values of one token in the KV cache of one layer: keys and values, or its latent."""
        if self.latent is not None:
            return self.latent.latent_dim + self.latent.rope_dim
        a = self.attention
        return a.num_kv_heads * (a.head_dim + a.value_width)

    def kv_bytes_per_token(self, itemsize: int, form: KVForm = FLOATS) -> int:
        """Returns the bytes of one token in the KV cache, over all layers. `itemsize` is that of
        the model's dtype."""
        a = self.attention
        if self.latent is not None:
            row_bytes = form.row_bytes(self.kv_values_per_token, 2, itemsize)
        else:
            widths = (a.head_dim, a.value_width)
            row_bytes = sum(form.row_bytes(width, 1, itemsize) for width in widths)
            row_bytes *= a.num_kv_heads
        return self.num_layers * row_bytes
