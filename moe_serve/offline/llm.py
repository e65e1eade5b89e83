"""The offline counterpart of the server: the same engine, called from Python.

from moe_serve import LLM, SamplingParams

with LLM() as llm:  # no model: the demonstration model
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from rich.progress import Progress, TextColumn

from moe_serve.adapters.adapter import Adapter
from moe_serve.cluster.started_cells import build_any_engine
from moe_serve.config.adapter_config import ExpertLora
from moe_serve.config.cells import CellsConfig
from moe_serve.config.keys import check_engine_config
from moe_serve.config.sections import (
    BatchPolicyName,
    CacheConfig,
    ClusterConfig,
    CudaGraphsName,
    DeviceName,
    DtypeName,
    EngineConfig,
    KernelsName,
    KVDtypeName,
    LowBitProductsName,
    ModelConfig,
    PipelineConfig,
    PredictorConfig,
    SchedulerConfig,
    SpeculationConfig,
    SpeculationMethod,
    WeightsName,
)
from moe_serve.config.tiers import TierConfig, check_tiers
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.opened_model import model_folder
from moe_serve.engine.request.kv_window import KVWindowRules
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.service_terms import Service
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.sampling.grammar.gate import GrammarGate
from moe_serve.engine.served_config import served_engine_config
from moe_serve.errors import EngineDeadError, InvalidRequestError
from moe_serve.offline.job import (
    GrowingAnswer,
    Job,
    Prompt,
    adapter_config,
    as_prompts,
    check_prompt,
    check_text_length,
    each_adapter,
    limited,
    make_output,
    resolve_rules,
    take_delta,
    tiers_of,
)
from moe_serve.offline.outputs import RequestOutput
from moe_serve.text.assistant.formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_format_of,
)
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.text_stream import TextStream
from moe_serve.text.tokenizer import Tokenizer


class LLM:
    """A loaded model. `close()` (or `with`) frees its memory. `adapters`: folders by name.
    `merge_adapter`: the folder of one that all requests use."""

    _ids = itertools.count()  # of requests
    _open_engine: DrivenEngine | None

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: DtypeName = "auto",
        device: DeviceName = "auto",
        kernels: KernelsName = "auto",
        expert_weights: WeightsName = "auto",
        linear_weights: WeightsName = "auto",
        low_bit_products: LowBitProductsName = "exact",
        expert_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        num_pages: int | None = None,
        prefix_cache: bool = True,
        kv_dtype: KVDtypeName = "auto",
        kv_disk: str | None = None,
        kv_disk_key_file: str | None = None,
        max_num_seqs: int = 64,
        max_batched_tokens: int = 1024,
        attention_ranks: int = 0,
        expert_ranks: int = 0,
        attention_tp: int = 1,
        cells: str | None = None,
        placement: str | None = None,
        micro_batches: int | Literal["auto"] = "auto",
        batch_policy: BatchPolicyName = "fifo",
        tiers: Mapping[str, Mapping[str, object]] | None = None,
        predictor: str | None = None,
        num_threads: int | None = None,
        cuda_graphs: CudaGraphsName = "auto",
        speculation: SpeculationMethod = "auto",
        adapters: Mapping[str, str] | None = None,
        merge_adapter: str | None = None,
        expert_lora: ExpertLora = "auto",
    ) -> None:
        model_config = ModelConfig(
            path=model, merge_adapter=merge_adapter, dtype=dtype, device=device, kernels=kernels,
            expert_weights=expert_weights, linear_weights=linear_weights,
            low_bit_products=low_bit_products, num_threads=num_threads, cuda_graphs=cuda_graphs,
            expert_memory_bytes=expert_memory_bytes, max_model_len=max_model_len)  # fmt: skip
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens,
            batch_policy=batch_policy, tiers=check_tiers(tiers or {}, "tiers", "LLM"))  # fmt: skip
        cluster_config = ClusterConfig(attention_ranks=attention_ranks, expert_ranks=expert_ranks,
                                       attention_tp=attention_tp, placement=placement)  # fmt: skip
        config = EngineConfig(
            model=model_config, scheduler=scheduler_config, cluster=cluster_config,
            cache=CacheConfig(num_pages=num_pages, prefix_cache=prefix_cache, kv_dtype=kv_dtype,
                              disk_path=kv_disk, disk_key_file=kv_disk_key_file),
            pipeline=PipelineConfig(micro_batches=micro_batches), cells=CellsConfig(layout=cells),
            predictor=PredictorConfig(path=predictor),
            speculation=SpeculationConfig(method=speculation),
            adapters=adapter_config(adapters or {}, expert_lora))  # fmt: skip
        checked = served_engine_config(check_engine_config(config, "LLM"))
        self._tokenizer: Tokenizer | None = Tokenizer.load(model_folder(checked.model))  # first
        built = build_any_engine(checked)
        self._open_engine, self.layout, self._adapters = built.engine, built.layout, built.adapters
        assert built.grammars is not None, "an engine of a checkpoint knows its vocabulary"
        self._gate, self._tiers = GrammarGate(built.grammars), config.scheduler.tiers
        self._kv_windows = KVWindowRules.of(built.spec, config.cache.page_size, is_allowed=True)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights and the cache, and ends the ranks. Every later call is refused."""
        engine = self._open_engine
        self._tokenizer = self._open_engine = None
        self._gate.close()
        self.__dict__.pop("_template", None)  # with its processes
        if engine is not None:
            engine.close()

    def stats(self) -> EngineStats:
        """Returns steps, pages, preemptions and tokens so far."""
        return self._engine.stats()

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineDeadError("this LLM was closed: make a new one.")
        return self._tokenizer

    @cached_property
    def _template(self) -> ChatTemplate | None:
        special_tokens = self.tokenizer.special_tokens
        return ChatTemplate.load(self.layout.folder, special_tokens=special_tokens)

    @property
    def _engine(self) -> DrivenEngine:
        if self._open_engine is None:
            raise EngineDeadError("this LLM was closed: make a new one.")
        return self._open_engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        adapter: str | Sequence[str | None] | None = None,
        service_tier: str | Sequence[str] = "",
        use_progress_bar: bool = True,
    ) -> list[RequestOutput]:
        """Completes one or many prompts (text or token ids); results in the prompts' order.

        Prompts reuse cached prefixes of calls with the same `cache_salt` only. `adapter` names the
        adapter of all prompts, or of each; None: the base model. `service_tier` names one of the
        LLM's `tiers` for all prompts, or one for each: prompts of urgent tiers go first.

        Raises InvalidRequestError before anything runs if a prompt or parameter is wrong, and
        GenerationError if a request failed inside the engine.
        """
        return self._generate(
            prompts, params, cache_salt, use_progress_bar, adapter, continues=True,
            tiers=service_tier,
        )  # fmt: skip

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str,
        use_progress_bar: bool,
        adapter: str | Sequence[str | None] | None,
        *,
        continues: bool,
        tiers: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Completes prompts. `continues` means that the answers continue the prompts' text."""
        listed = as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = list(params)
        if len(each) != len(listed):
            raise InvalidRequestError(
                f"{len(listed)} prompts came with {len(each)} SamplingParams: give one for "
                "all prompts, or one for each.",
                param="params",
            )
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(
                f"cache_salt must be a string, got {cache_salt!r}.", param="cache_salt"
            )
        held = each_adapter(self._adapters, adapter, len(listed))
        named = tiers_of(tiers, len(listed), self._tiers)
        jobs = [
            self._job(prompt, p, cache_salt, continues, tier, own)
            for prompt, p, tier, own in zip(listed, each, named, held, strict=True)
        ]
        for job in jobs:
            for answer in job.answers:
                self._engine.add(answer.request)
        try:
            self._run(jobs, use_progress_bar)
        finally:
            for answer in (a for job in jobs for a in job.answers):
                self._engine.abort(answer.request.request_id)
        return [make_output(job, self.tokenizer) for job in jobs]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
        use_progress_bar: bool = False,
    ) -> RequestOutput:
        """Answers one conversation, through the model's chat template."""
        template = self._template
        if template is None:
            raise InvalidRequestError(
                f"{self.layout.folder} has no chat template: use generate.", param="messages"
            )
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequestError(
                'messages must be a list of {"role": ..., "content": ...}, and not empty.',
                param="messages",
            )
        text = template.render(messages, add_generation_prompt=True)
        ids = self._encoded(text, add_special_tokens=False)
        return self._generate(
            [ids], params, cache_salt, use_progress_bar, adapter, continues=False
        )[0]

    def _encoded(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        check_text_length(text, self.tokenizer, self.layout.max_model_len)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        salt: str,
        continues: bool,
        tier: TierConfig,
        adapter: Adapter | None,
    ) -> Job:
        is_text = isinstance(prompt, str)
        ids = tuple(self._encoded(prompt) if isinstance(prompt, str) else prompt)
        check_prompt(ids, params, self.layout.vocab_size, self.layout.max_model_len)
        self._kv_windows.check(params.kv_window)
        vocab_size, gate = self.layout.vocab_size, self._gate
        rules = resolve_rules(params, ids, self.tokenizer, vocab_size, gate, self._reasoning)
        rules = limited(rules, tier)
        others = replace(rules, prompt_logprobs=None)  # equal for every choice
        stem = f"offline-{next(self._ids)}"
        answers = [
            GrowingAnswer(
                GenerationRequest(
                    request_id=f"{stem}-{choice}",
                    prompt_token_ids=ids,
                    params=params,
                    resolved=others if choice else rules,
                    choice=choice,
                    arrival_time=time.monotonic(),
                    cache_salt=salt,
                    service=Service.of_tier(tier),
                    adapter=adapter,
                ),
                TextStream(
                    self.tokenizer, params, follows=ids[-1] if continues else None, rules=rules
                ),
            )
            for choice in range(params.n)
        ]
        return Job(stem, str(prompt) if is_text else None, ids, answers, time.monotonic())

    def _reasoning(self) -> ReasoningFormat | None:
        """Returns the format of the reasoning that the chat template shows."""
        source = "" if self._template is None else self._template.source
        return REASONING_FORMATS.get(reasoning_format_of(source) or "none")

    def _run(self, jobs: list[Job], use_progress_bar: bool) -> None:
        """Steps until every answer is complete. Ctrl-C leaves through `generate`, which aborts the
        requests."""
        open_answers = {a.request.request_id: (job, a) for job in jobs for a in job.answers}
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[speed]}"))
        with Progress(*columns, disable=not use_progress_bar) as progress:
            task = progress.add_task("Generating", total=len(open_answers), speed="")
            clock, num_tokens = time.monotonic(), 0
            while open_answers:
                for delta in self._engine.step():
                    if delta.request_id not in open_answers:
                        continue
                    job, answer = open_answers[delta.request_id]
                    num_tokens += len(delta.token_ids)
                    if take_delta(job, answer, delta, self._engine.abort):
                        del open_answers[delta.request_id]
                        progress.advance(task)
                if use_progress_bar:
                    seconds = max(time.monotonic() - clock, 1e-9)
                    progress.update(task, speed=f"{num_tokens / seconds:.0f} tok/s")
        self._engine.check_integrity()
