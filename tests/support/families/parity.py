"""The checks for every family: the same logits and tokens as transformers, however steps are
cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

import moe_serve  # its LLM when it is used: the kernels' tests need none of its packages
from moe_kernels.kernel_choice import KernelsName
from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import WeightsName
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport
from tests.support.families.case import VOCAB_SIZE, Case
from tests.support.sampled_cases import EVERY_CASE


def most_likely(
    model: transformers.PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]
) -> list[int]:
    """Returns the likeliest token by transformers after the prompt and after each of `tokens` but
    the last. The result equals `tokens` exactly if they are the greedy continuation, because each
    token follows from those before."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
    chosen: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return chosen


_LENGTHS = (1, 17, 55)  # answers of 12 tokens cross a page and the windows of 20, 24 and 64
_NUM_TOKENS, _NUM_IN_CHUNKS = (64, 64) if EVERY_CASE else (12, 6)
_CHUNK = 7 if EVERY_CASE else 13
_NUM_POSITIONS = 100  # of the logits that are compared


def write_checkpoint(folder: Path, case: Case) -> Path:
    """Writes random weights in fp32; norms, biases, sinks and selection biases are random too."""
    torch.manual_seed(case.config.get_text_config().hidden_size)
    if case.model_class is None:
        model = _auto_class(case.config).from_config(case.config, dtype=torch.float32)
    else:
        model = case.model_class(case.config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if case.randomise is not None and case.randomise(name, tensor):
                continue
            if "norm" in name and tensor.dim() == 1:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                tensor.normal_(0, 0.3)
            elif tensor.dim() >= 2 and not tensor.isfinite().all() or "experts" in name:
                tensor.normal_(0, 0.2)  # some fused parameters are left uninitialised
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer of 256 bytes after `<|endoftext|>`, with filler up to the vocabulary's
    size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}
    vocab |= {f"<filler{i}>": i for i in range(len(vocab), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def reference(folder: Path) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    model: transformers.PreTrainedModel = model_class.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _auto_class(config: transformers.PreTrainedConfig) -> Any:
    """Returns the class for the reference model. A text model inside a larger one is served alone,
    and compared with the whole."""
    is_whole = config.get_text_config() is config
    return (
        transformers.AutoModelForCausalLM if is_whole else transformers.AutoModelForImageTextToText
    )


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(1, VOCAB_SIZE, n).tolist() for n in lengths]


def check_logits(folder: Path, kernels: KernelsName) -> None:
    """Checks the logits of every position within 1e-4 of the reference's largest: whole, and in
    chunks of 13 (7 if every case runs)."""
    (prompt,) = random_prompts((_NUM_POSITIONS,))
    expected = _reference_logits(folder)
    for chunk in (_NUM_POSITIONS, _CHUNK):
        error = (model_logits(folder, kernels, prompt, chunk) - expected).abs().max()
        error /= expected.abs().max()
        assert error < 1e-4, f"{folder.name}, {kernels}, {chunk=}, {error=:.2e}"


def check_greedy_tokens(folder: Path, kernels: KernelsName) -> None:
    """Checks greedy tokens for three prompts at once: 12 with whole prompts and 6 in chunks of 13
    tokens; if every case runs, 64 with whole prompts and in chunks of 7."""
    prompts = random_prompts(_LENGTHS)
    for budget, num_tokens in ((1024, _NUM_TOKENS), (_CHUNK, _NUM_IN_CHUNKS)):
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        with moe_serve.LLM(
            str(folder), kernels=kernels, max_batched_tokens=budget, num_pages=64
        ) as llm:
            outputs = llm.generate(prompts, params, use_progress_bar=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = output.outputs[0].token_ids
            assert len(tokens) == num_tokens
            expected = _greedy_tokens(folder, tuple(prompt), tuple(tokens))
            assert list(tokens) == expected, f"{folder.name}, {kernels}, {budget=}, {len(prompt)=}"


def check_invariance(folder: Path, kernels: KernelsName) -> None:
    """Checks that in bf16 a request's tokens and log probabilities do not depend on its neighbours,
    bit for bit."""
    prompts = random_prompts((40, 3, 17, 64, 9, 33))
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2)
    with moe_serve.LLM(
        str(folder), kernels=kernels, dtype="bfloat16", max_batched_tokens=19, num_pages=64
    ) as llm:
        together = llm.generate(prompts, params, use_progress_bar=False)
    with moe_serve.LLM(str(folder), kernels=kernels, dtype="bfloat16", num_pages=64) as llm:
        # Computed, and then from cached pages, if the prompt fills one.
        alike = [*zip(prompts[:3], together, strict=False)]
        for prompt, crowd in (*alike, *(each for each in alike if len(each[0]) > 16)):
            (alone,) = llm.generate([prompt], params, use_progress_bar=False)
            mine, theirs = alone.outputs[0], crowd.outputs[0]
            where = f"{folder.name}, {kernels}, {len(prompt)=}"
            assert mine.token_ids == theirs.token_ids, where
            assert mine.logprobs == theirs.logprobs, where


def model_logits(
    folder: Path,
    kernels: KernelsName,
    prompt: list[int],
    chunk: int,
    dtype: torch.dtype = torch.float32,
    expert_weights: WeightsName = "auto",
    device: torch.device | None = None,
) -> Tensor:
    """Returns the logits of all positions, on the CPU."""
    device = device or torch.device("cpu")
    loader = ModelLoader(
        folder, kernels=kernels, dtype=dtype, device=device, expert_weights=expert_weights
    )
    kv = KVCache(loader.spec, 9, 16, dtype, device)
    stage = loader.attention_stage(512)
    pipeline = Pipeline(stage, LocalTransport(loader.expert_stage()), kv, device)
    pages, parts = (4, 9, 1, 7, 2, 8, 3), []
    for start in range(0, len(prompt), chunk):
        ids = np.array(prompt[start : start + chunk])
        piece = SequenceSlice(0, start, ids, pages, len(ids))
        parts.append(pipeline.run(StepPlan((MicroBatch((piece,)),))))
    return torch.cat(parts).cpu()


@cache
def _reference_logits(folder: Path) -> Tensor:
    (prompt,) = random_prompts((_NUM_POSITIONS,))
    with torch.inference_mode():
        logits: Tensor = reference(folder)(torch.tensor([prompt])).logits[0]
    return logits


@cache
def _greedy_tokens(folder: Path, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[int]:
    """Returns the tokens that transformers finds most likely after the prompt and `tokens`; equal
    to `tokens` if these are its greedy continuation."""
    return most_likely(reference(folder), prompt, tokens)
