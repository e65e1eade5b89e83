"""A process that fills a disk tier until it is killed: MODEL FOLDER SEED."""

from __future__ import annotations

import sys

from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.offline.llm import LLM


def main() -> None:
    model, folder, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with LLM(model, kv_disk=folder, num_threads=1) as llm:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for turn in range(1000):
            prompt = [1 + (turn * 7 + seed * 13 + i * i) % 290 for i in range(90)]
            llm.generate([prompt], SamplingParams(max_tokens=9), use_progress_bar=False)


if __name__ == "__main__":
    main()
