"""The routers of the model families, for compilation ahead of time."""

from __future__ import annotations

from moe_kernels.gpu.compile_case import CompileCase
from moe_kernels.gpu.router.heuristics import router_config
from moe_kernels.gpu.router.kernel import route_rows
from moe_kernels.interface.routing import RouterShape


def _softmax(num_experts: int, top_k: int, is_renormalised: bool = True) -> RouterShape:
    return RouterShape(num_experts=num_experts, top_k=top_k, is_renormalised=is_renormalised)


_DEEPSEEK_V2 = RouterShape(
    num_experts=160, top_k=6, is_renormalised=False, num_groups=8, num_groups_kept=3, scaling=16.0
)
_DEEPSEEK_V3 = RouterShape(
    num_experts=256,
    top_k=8,
    is_renormalised=True,
    scoring="sigmoid",
    renorm_floor=1e-20,
    num_groups=8,
    num_groups_kept=4,
    group_score="top2",
    scaling=2.5,
)
_KIMI_K2 = RouterShape(
    num_experts=384, top_k=8, is_renormalised=True, scoring="sigmoid", scaling=2.827
)
# name, shape, whether it has a selection bias
_ROUTERS = (
    ("mixtral", _softmax(8, 2), False),
    ("gpt-oss-20b", _softmax(32, 4), False),
    ("gpt-oss-120b", _softmax(128, 4), False),
    ("olmoe", _softmax(64, 8, is_renormalised=False), False),
    ("qwen3-30b-a3b", _softmax(128, 8), False),
    ("qwen3-next", _softmax(512, 10), False),
    ("deepseek-v2", _DEEPSEEK_V2, False),
    ("deepseek-v3", _DEEPSEEK_V3, True),
    ("kimi-k2", _KIMI_K2, True),
)


def _case(name: str, shape: RouterShape, has_bias: bool) -> CompileCase:
    config = router_config(shape)
    pointers = {"logits_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32"}
    if has_bias:
        pointers["bias_ptr"] = "*fp32"
    return CompileCase(
        name=f"router/{name}",
        kernel=route_rows,
        signature={
            **pointers,
            "logits_step": "i32",
            "renorm_floor": "fp32",
            "scaling": "fp32",
        },
        constexprs={
            **({} if has_bias else {"bias_ptr": None}),
            "counts_ptr": None,
            "NUM_EXPERTS": shape.num_experts,
            "TOP_K": shape.top_k,
            "NUM_GROUPS": shape.num_groups,
            "NUM_GROUPS_KEPT": shape.num_groups_kept,
            "IS_TOP2": shape.group_score == "top2",
            "IS_SIGMOID": shape.scoring == "sigmoid",
            "IS_RENORMALISED": shape.is_renormalised,
            "HAS_BIAS": has_bias,
            "HAS_COUNTS": False,
            "BLOCK_G": config.block_groups,
            "BLOCK_S": config.block_size,
        },
        num_warps=config.num_warps,
        num_stages=1,
        divisible_by_16=("logits_step",) if shape.num_experts % 16 == 0 else (),
    )


CASES = tuple(_case(*router) for router in _ROUTERS)
