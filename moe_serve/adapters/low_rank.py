"""Makes the additions to the linear layers of attention from the matrices of a LoRA.

Queries, keys and values are one linear layer here, so their additions are one, too. Its B is three
parts, each of which reads its own ranks:

    A = [A_q; A_k; A_v]      B = scale_q B_q, scale_k B_k, scale_v B_v

N outputs, K inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_kernels.interface.adapters import LowRank, LowRankPart
from moe_serve.adapters.peft_lora import LowRankMatrices
from moe_serve.model.checkpoint.manifest import attention_table
from moe_serve.model.load.load_attention import rotation_order, rows_in_order
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.tensor_shard import TensorShard

_ONE = TensorShard(0, 1)
_RANK_STEP = 16  # ranks are filled up with zeros, so that kernels have whole panels
_GROUPED = {"qkv": ("q", "k", "v"), "output": ("o",)}
_LATENT = {"query_down": ("q_a",), "query": ("q_b", "q"), "latent": ("kv_a",), "output": ("o",)}


def make_low_rank(
    loader: ModelLoader,
    layer: int,
    matrices: Mapping[str, LowRankMatrices],
    shard: TensorShard = _ONE,
) -> tuple[Mapping[str, LowRank], int]:
    """Returns the additions to a layer's attention, keyed as AdapterLayer says, and their bytes.

    `shard`: has its own heads. The output is whole, as every shard has all its columns.
    """
    spec = loader.spec
    table = attention_table(loader.names, spec, layer)
    made, num_bytes = {}, 0
    for key, stored in linear_parts(spec).items():
        sizes = {part: table[part].shape for part in stored if part in table}
        own = {part: matrices[part] for part in sizes if part in matrices}
        if not own:
            continue
        made[key], size = _joined(loader, layer, sizes, own, shard)
        num_bytes += size
    return made, num_bytes


def _joined(
    loader: ModelLoader,
    layer: int,
    sizes: Mapping[str, tuple[int, ...]],
    own: Mapping[str, LowRankMatrices],
    shard: TensorShard,
) -> tuple[LowRank, int]:
    """Returns the addition to a linear layer that has the rows of several matrices, and its
    bytes."""
    spec, linear = loader.spec, loader.kernels.linear
    rank = sum(len(each.a_RK) for each in own.values())
    a_RK = torch.zeros(padded_rank(rank), next(iter(sizes.values()))[1])
    parts, ranks, outputs, num_bytes = [], slice(0, 0), slice(0, 0), 0
    for part, shape in sizes.items():
        held = slice(None) if part == "o" else shard.rows(part, shape[0], spec, layer)
        outputs = slice(outputs.stop, outputs.stop + len(range(shape[0])[held]))
        matrices = own.get(part)
        if matrices is None:
            continue
        ranks = slice(ranks.stop, ranks.stop + len(matrices.a_RK))
        a_RK[ranks] = matrices.a_RK.float()
        whole_NR = rows_in_order(matrices.b_NR.float(), row_order(spec, layer, part))
        b_NR = (matrices.scale * whole_NR[held]).to(loader.device, loader.dtype)
        num_bytes += b_NR.nbytes
        parts.append(LowRankPart(linear(b_NR), ranks, outputs))
    made = a_RK.to(loader.device, loader.dtype)
    return LowRank(linear(made), tuple(parts), outputs.stop), num_bytes + made.nbytes


def padded_rank(rank: int) -> int:
    """Returns the rank in memory, with the rows of zeros."""
    return -(-rank // _RANK_STEP) * _RANK_STEP


def linear_parts(spec: ModelSpec) -> Mapping[str, tuple[str, ...]]:
    """Returns the linear layers of attention, and the stored matrices behind each."""
    return _GROUPED if spec.latent is None else _LATENT


def row_order(spec: ModelSpec, layer: int, part: str) -> Tensor | None:
    """Returns the order of the rows that the loader gives this matrix."""
    latent = spec.latent
    if latent is None:
        head_dim = spec.layers[layer].attention.head_dim
        return rotation_order(spec, head_dim, 0) if part in ("q", "k") else None
    if part in ("q", "q_b"):
        return rotation_order(spec, latent.nope_dim + latent.rope_dim, latent.nope_dim)
    if part == "kv_a":
        return rotation_order(spec, latent.latent_dim + latent.rope_dim, latent.latent_dim)
    return None
