"""The two example adapters of the demonstration model make pages of a manual likelier."""

from __future__ import annotations

from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.offline.llm import LLM
from tests.support.adapters.answers import adapters_of, logprobs_of

PAGE = """# Limits of a request

This page is for operators. It lists the settings that limit what one request may use.

    moe-serve serve MODEL --max-model-len 4096

| key | default | meaning |
|---|---|---|
| `server.max_body_bytes` | 4194304 | the largest body of a request |
| `scheduler.max_num_seqs` | 64 | sequences that run at once |

- A request that is too long gets 400, with a sentence that names the field and the limit.
- The metrics `requests_total` and `tokens_total` count what the server has answered.
"""
PARAMS = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def test_a_page_becomes_likelier() -> None:
    folder, names = demo_model_folder() / "adapters", ["lora", "esft"]
    examples = adapters_of(**{name: folder / f"manual-{name}" for name in names})
    with LLM(adapters=examples) as llm:
        outputs = llm.generate([PAGE] * 3, PARAMS, adapter=[None, *names], use_progress_bar=False)
    base, lora, esft = (-sum(logprobs_of(output)) for output in outputs)
    assert lora < 0.9 * base and esft < 0.9 * base, (base, lora, esft)
