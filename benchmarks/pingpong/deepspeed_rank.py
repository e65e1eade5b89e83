"""Runs one of two ranks with DeepSpeed's MoE layer and half of the experts.

It runs in the interpreter that has deepspeed, and needs torch but not moe-serve. It reads a line of
JSON with the sizes and writes a line with the median seconds of a forward pass, by the number of
rows of this rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn


class SwigluExpert(nn.Module):
    """An expert with gate, up and down, as in the models that moe-serve serves. D width, F
    expert width.
    """

    def __init__(self, width: int, expert_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, expert_width, bias=False)
        self.up = nn.Linear(width, expert_width, bias=False)
        self.down = nn.Linear(expert_width, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down(nn.functional.silu(self.gate(x_TD)) * self.up(x_TD))
        return out_TD


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    job = json.loads(sys.stdin.readline())
    if job["core"] is not None:
        os.sched_setaffinity(0, {job["core"]})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Only all-reduce uses it, and it takes a C++ compiler a minute: not for this layer.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    layer = MoE(
        job["width"],
        SwigluExpert(job["width"], job["expert_width"]),
        num_experts=job["num_experts"],
        ep_size=2,
        k=job["top_k"],
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    layer.set_deepspeed_parallelism()
    layer = layer.to(torch.bfloat16).eval()
    seconds = {str(rows): _time(layer, rows, job["width"], job["repeat"]) for rows in job["rows"]}
    replies.write(json.dumps(seconds) + "\n")
    replies.flush()


@torch.inference_mode()
def _time(layer: nn.Module, rows: int, width: int, repeat: int) -> float:
    x_TD = torch.randn(1, rows, width).to(torch.bfloat16)
    times = []
    for _ in range(repeat + 3):
        torch.distributed.barrier()
        start = time.perf_counter()
        layer(x_TD)
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
