"""Every launch of the Triton set for the models that ship is among the compile cases.

Nothing is computed: weights and rows are on the meta device, and launches are recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.gpu.compile_case import TARGETS, find_cases
from moe_kernels.gpu.expert_bank import GroupedExpertBank
from moe_kernels.gpu.gpu_kernels import TritonKernels
from moe_kernels.gpu.sampling import kernel as sampling_kernels
from moe_kernels.gpu.sampling.api import adjust, sample, score_tokens, uniform
from moe_kernels.gpu.sampling.sampling_rows import Adjustments, SamplingRows
from moe_kernels.interface.adapters import RowAdditions
from moe_kernels.interface.attention_shape import (
    AttentionShape,
    LatentShape,
    QKNormWeights,
    RotaryTable,
    StepRows,
)
from moe_kernels.interface.kernels import AttentionCall, ExpertWeights, GatedActivation
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.interface.routing import RouterShape
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix

META = torch.device("meta")
BOUNDS = ("VOCAB", "NUM_BLOCKS")  # of sampling: sizes that only bound a loop or a mask
NUM_ROWS = (1, 5, 64, 3000)
TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64",
    torch.int32: "i32", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The widths of a model and its special features."""

    width: int
    vocab: int
    router: RouterShape
    experts: tuple[int, int]  # here, and their width
    attention: AttentionShape
    linears: tuple[tuple[int, int], ...]  # inputs, outputs
    norms: tuple[int, ...] = ()  # widths besides the model's
    heads: tuple[tuple[int, int, int], ...] = ()  # heads, outputs, inputs
    has_bias: bool = False
    has_shared: int = 0  # width of a shared expert
    activation: GatedActivation = GatedActivation()


def softmax_router(num_experts: int, top_k: int, is_renormalised: bool = True) -> RouterShape:
    return RouterShape(num_experts=num_experts, top_k=top_k, is_renormalised=is_renormalised)


def grouped(heads: int, kv_heads: int, dim: int, **more: Any) -> AttentionShape:
    return AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, **more)


MODELS = {
    "mixtral-8x7b": Model(
        width=4096, vocab=32_000, router=softmax_router(8, 2), experts=(8, 14336),
        attention=grouped(32, 8, 128), linears=((4096, 6144), (4096, 4096)),
    ),
    "qwen3-30b-a3b": Model(
        width=2048, vocab=151_936, router=softmax_router(128, 8), experts=(128, 768),
        attention=grouped(32, 4, 128, qk_norm="head"), linears=((2048, 5120), (4096, 2048)),
    ),
    "deepseek-v3": Model(
        width=7168, vocab=129_280, router=RouterShape(
            num_experts=256, top_k=8, is_renormalised=True, scoring="sigmoid", renorm_floor=1e-20,
            num_groups=8, num_groups_kept=4, group_score="top2", scaling=2.5,
        ),
        experts=(8, 2048), attention=grouped(128, 1, 576, value_dim=512),
        linears=((7168, 1536), (1536, 24576), (7168, 576), (16384, 7168)), norms=(1536,),
        heads=((128, 512, 128), (128, 128, 512)), has_shared=2048,
    ),
    "gpt-oss-120b": Model(
        width=2880, vocab=201_088, router=softmax_router(128, 4), experts=(128, 2880),
        attention=grouped(64, 8, 64, has_sinks=True, sliding_window=128),
        linears=((2880, 5120), (4096, 2880)), has_bias=True,
        activation=GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0),
    ),
    "olmoe": Model(
        width=2048, vocab=50_304, router=softmax_router(64, 8, False), experts=(64, 1024),
        attention=grouped(16, 16, 128, qk_norm="row"), linears=((2048, 6144), (2048, 2048)),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, the constants and types it was compiled for, and the integers that were multiples
    of 16."""

    kernel: str
    constants: tuple[tuple[str, object], ...]
    types: tuple[tuple[str, str], ...]
    num_warps: int
    multiples: frozenset[str]


def launch_of(name: str, arguments: dict[str, Any], options: dict[str, Any]) -> Launch:
    constants, types, multiples = {}, {}, set()
    for argument, value in arguments.items():
        if isinstance(value, Tensor):
            types[argument] = "*" + TYPES[value.dtype]
        elif isinstance(value, TensorDescriptor):
            dtype = TYPES[value.base.dtype]
            types[argument] = f"tensordesc<{dtype}[{', '.join(map(str, value.block_shape))}]>"
        elif argument.isupper() or value is None:
            constants[argument] = value
        else:
            types[argument] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                multiples.add(argument)
    return Launch(
        name,
        tuple(sorted((k, v) for k, v in constants.items() if k not in BOUNDS)),
        tuple(sorted(types.items())),
        options.get("num_warps", 4),
        frozenset(multiples),
    )


@cache
def assumed_multiples(target: int) -> dict[Launch, list[frozenset[str]]]:
    """Returns what the compile cases of a target cover, up to BOUNDS: a launch without its
    multiples of 16, and those that each of its cases assumes."""
    found: dict[Launch, list[frozenset[str]]] = defaultdict(list)
    for case in find_cases():
        if target in case.targets:
            covered = Launch(
                case.kernel.__name__,
                tuple(sorted((k, v) for k, v in case.constexprs.items() if k not in BOUNDS)),
                tuple(sorted(case.signature.items())),
                case.num_warps,
                frozenset(),
            )
            found[covered].append(frozenset(case.divisible_by_16))
    return found


def is_compiled(launch: Launch, target: int) -> bool:
    """Returns True if a case covers the launch; it may assume fewer multiples of 16."""
    assumed = assumed_multiples(target).get(replace(launch, multiples=frozenset()), [])
    return any(names <= launch.multiples for names in assumed)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Launch]]:
    found: set[Launch] = set()

    def note(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {k: v for k, v in kwargs.items() if k in kernel.arg_names}
        found.add(launch_of(kernel.__name__, arguments, kwargs))

    monkeypatch.setattr(type(sampling_kernels.block_tops), "run", note)
    yield found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def run_products(kernels: TritonKernels, model: Model) -> None:
    """Makes linears, the router, experts and norms, and runs each with every number of rows."""
    width, has_bias = model.width, model.has_bias
    for num_inputs, num_outputs in (*model.linears, (width, model.vocab)):
        bias = empty(num_outputs) if has_bias and num_outputs != model.vocab else None
        linear = kernels.linear(empty(num_outputs, num_inputs), bias)
        for num_rows in NUM_ROWS:
            linear(empty(num_rows, num_inputs))
    for heads, num_outputs, num_inputs in model.heads:
        layer = kernels.head_linear(empty(heads, num_outputs, num_inputs))
        for num_rows in NUM_ROWS:
            layer(empty(num_rows, heads, num_inputs))
    experts = model.router.num_experts
    bias = empty(experts, dtype=torch.float32) if has_bias else None
    router = kernels._linear(empty(experts, width), bias, torch.float32)
    selection = empty(experts, dtype=torch.float32) if model.norms else None
    bank = bank_of(kernels, model, *model.experts)
    shared = bank_of(kernels, model, 1, model.has_shared) if model.has_shared else None
    for num_rows in NUM_ROWS:
        x = empty(num_rows, width)
        ids, weights = kernels.route(router(x), model.router, selection)
        out = run_bank(bank, x, ids, weights)
        if shared is not None:
            out = run_bank(shared, x, ids[:, :1], weights[:, :1])
        if model is MODELS["qwen3-30b-a3b"]:
            run_signs(kernels, model, bank, (x, ids, weights))
        for norm in (width, *model.norms):
            kernels.rms_norm(empty(num_rows, norm), empty(norm), 1e-6)
        kernels.add(x, out, out if model.has_shared else None)


def bank_of(
    kernels: TritonKernels, model: Model, num_experts: int, expert_width: int
) -> GroupedExpertBank:
    width = model.width
    biases = [empty(n) if model.has_bias else None for n in (expert_width, expert_width, width)]
    one = ExpertWeights(
        empty(expert_width, width), empty(expert_width, width), empty(width, expert_width), *biases
    )
    return kernels.experts([one] * num_experts, model.activation)


def run_bank(bank: GroupedExpertBank, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    bank.partial(x, ids, weights)
    return bank(x, ids, weights)


def run_signs(
    kernels: TritonKernels, model: Model, bank: GroupedExpertBank, rows: tuple[Tensor, ...]
) -> None:
    """Runs what BitDelta adapters add to a linear layer and to experts."""

    def signs(num_rows: int, width: int) -> SignMatrix:
        bits, scales = empty(num_rows, width // 8, dtype=torch.uint8), empty(1, dtype=torch.float32)
        return SignMatrix(bits_NB=bits, num_columns=width, scales_N=scales)

    x, ids, weights = rows
    num_inputs, num_outputs = model.linears[0]
    base = kernels.linear(empty(num_outputs, num_inputs))
    kernels.signed_linear(base, signs(num_outputs, num_inputs))(empty(len(x), num_inputs))
    num_experts, width = model.experts
    ups, down = signs(width, model.width), signs(model.width, width)
    one = SignedExpert(gate=ups, up=ups, down=down)
    is_changed = torch.ones(num_experts, dtype=torch.bool)
    added = kernels.expert_signs(dict.fromkeys(range(num_experts), one), is_changed)
    index = np.zeros(len(x), dtype=np.int64)
    bank.added_partial(x, ids, weights, RowAdditions(index, [added]))


def run_attention(kernels: TritonKernels, model: Model, num_rows: int) -> None:
    shape = model.attention
    tokens = StepRows(np.array([num_rows]), np.array([0]), [list(range(200))], 16)
    plan = kernels.plan_attention(tokens, shape, torch.device("cpu"))
    positions = empty(num_rows, dtype=torch.int64)
    rope = 64 if model.heads else shape.head_dim
    table = RotaryTable(*(empty(num_rows, rope, dtype=torch.float32) for _ in range(2)))
    kv_rows = empty(num_rows * shape.num_kv_heads, dtype=torch.int64)
    # Not on the meta device, where all tensors have one address: latent values are the keys'.
    keys, values = (
        torch.empty(200, shape.num_kv_heads, 16, shape.head_dim).bfloat16() for _ in "kv"
    )
    if model.heads:
        kernels.attend_latent(
            empty(num_rows, 128, 512), empty(num_rows, 128, 64), empty(num_rows, 576), empty(512),
            AttentionCall(table, positions, kv_rows, KVPages(keys, keys[..., :512]), plan),
            LatentShape(
                num_heads=128, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512,
                query_rank=1536, norm_eps=1e-6, softmax_scale=0.1,
            ),
        )  # fmt: skip
        return
    sizes = (1, 1) if shape.qk_norm == "head" else (shape.num_heads, shape.num_kv_heads)
    norm = QKNormWeights(*(empty(n * shape.head_dim) for n in sizes))
    sinks = empty(shape.num_heads, dtype=torch.float32) if shape.has_sinks else None
    qkv = empty(num_rows, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    kernels.attend(
        qkv, None if shape.qk_norm == "none" else norm, sinks,
        AttentionCall(table, positions, kv_rows, KVPages(keys, values), plan), shape,
    )  # fmt: skip


def run_sampling(model: Model, num_rows: int) -> None:
    def of(dtype: torch.dtype) -> Tensor:
        return empty(num_rows, dtype=dtype)

    logits = empty(num_rows, model.vocab, dtype=torch.float32)
    floats, ints = of(torch.float32), of(torch.int64)
    adjust(
        logits,
        Adjustments(
            rows_M=ints, tokens_M=ints, biases_M=floats, counts_M=of(torch.int32),
            is_seen_M=of(torch.bool), repetitions_S=floats, presences_S=floats,
            frequencies_S=floats,
        ),
    )  # fmt: skip
    for is_greedy, has_filter in ((True, False), (False, False), (False, True)):
        rows = SamplingRows(
            temperatures_S=floats, draws_S=uniform(ints, ints, ints), min_ps_S=floats,
            top_ks_S=of(torch.int32), top_ps_S=of(torch.float64), is_greedy=is_greedy,
            has_filter=has_filter,
        )  # fmt: skip
        score_tokens(logits, sample(logits, rows).tokens_S)


def missing(launches: set[Launch], target: int) -> list[str]:
    return sorted(str(launch) for launch in launches if not is_compiled(launch, target))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_launched_is_compiled(name: str, target: int, launches: set[Launch]) -> None:
    model = MODELS[name]
    for has_equal_tiles in (False, True):
        kernels = TritonKernels(torch.device("cpu"), torch.bfloat16)
        kernels._chip = replace(
            kernels._chip, capability=target, has_equal_tiles=has_equal_tiles, has_fp8=target >= 89
        )
        run_products(kernels, model)
        if target == 90:  # what the interpreter's tiles are of; the other chips' are by config
            for num_rows in NUM_ROWS:
                run_attention(kernels, model, num_rows)
    for num_rows in NUM_ROWS:
        run_sampling(model, num_rows)
    lost = missing(launches, target)
    assert len(launches) > 20, f"{len(launches)} launches: nothing was run"
    assert not lost, f"{len(lost)} of {len(launches)} launches are no compile case:\n" + "\n".join(
        lost
    )
