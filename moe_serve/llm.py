"""The offline twin of the server: the same engine, called from Python.

from moe_serve import LLM, SamplingParams

with LLM() as llm:  # no model: the demonstration model
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.progress import Progress, TextColumn

from moe_serve.config import (
    CacheConfig,
    DeviceName,
    DtypeName,
    EngineConfig,
    KernelsName,
    ModelConfig,
    PipelineConfig,
    SchedulerConfig,
)
from moe_serve.config_keys import check_engine_config
from moe_serve.engine.build import build_engine
from moe_serve.engine.client import EngineStats
from moe_serve.engine.engine import Engine
from moe_serve.engine.request import FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from moe_serve.engine.sampling_params import SamplingParams
from moe_serve.errors import (
    ContextLengthError,
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
)
from moe_serve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.text_stream import TextStream
from moe_serve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A loaded model. `close()` (or `with`) gives its memory back."""

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: DtypeName = "auto",
        device: DeviceName = "auto",
        kernels: KernelsName = "auto",
        max_model_len: int | None = None,
        num_pages: int | None = None,
        max_num_seqs: int = 64,
        max_batched_tokens: int = 1024,
        micro_batches: int = 1,
        num_threads: int | None = None,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(
                path=model,
                dtype=dtype,
                device=device,
                kernels=kernels,
                max_model_len=max_model_len,
                num_threads=num_threads,
            ),
            cache=CacheConfig(num_pages=num_pages),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens
            ),
            pipeline=PipelineConfig(micro_batches=micro_batches),
        )
        built = build_engine(check_engine_config(config, "LLM"))
        self._open_engine: Engine | None = built.engine
        self.layout = built.layout
        self._tokenizer: Tokenizer | None = Tokenizer.load(self.layout.folder)
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the weights and the cache; every later call is refused."""
        self._tokenizer = self._open_engine = None

    def stats(self) -> EngineStats:
        """Steps, pages, preemptions and tokens so far."""
        return self._engine.stats()

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineDeadError("this LLM was closed: make a new one.")
        return self._tokenizer

    @property
    def _engine(self) -> Engine:
        if self._open_engine is None:
            raise EngineDeadError("this LLM was closed: make a new one.")
        return self._open_engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress_bar: bool = True,
    ) -> list[RequestOutput]:
        """Complete one or many prompts (text or token ids); results in the prompts' order.

        Raises InvalidRequestError before anything runs if a prompt or parameter is wrong, and
        GenerationError if a request failed inside the engine.
        """
        listed = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = list(params)
        if len(each) != len(listed):
            raise InvalidRequestError(
                f"{len(listed)} prompts came with {len(each)} SamplingParams.", param="params"
            )
        jobs = [self._job(prompt, p) for prompt, p in zip(listed, each, strict=True)]
        for job in jobs:
            for answer in job.answers:
                self._engine.add(answer.request)
        try:
            self._run(jobs, use_progress_bar)
        finally:
            for answer in (a for job in jobs for a in job.answers):
                self._engine.abort(answer.request.request_id)
        return [self._output(job) for job in jobs]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        use_progress_bar: bool = False,
    ) -> RequestOutput:
        """Answer one conversation, through the model's chat template."""
        template = ChatTemplate.load(
            self.layout.folder, special_tokens=self.tokenizer.special_tokens
        )
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
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([ids], params, use_progress_bar=use_progress_bar)[0]

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        is_text = isinstance(prompt, str)
        ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        self._check(ids, params)
        stem = f"offline-{next(self._ids)}"
        answers = [
            _Answer(
                GenerationRequest(
                    request_id=f"{stem}-{choice}",
                    prompt_token_ids=ids,
                    params=params,
                    choice=choice,
                    arrival_time=time.monotonic(),
                ),
                TextStream(self.tokenizer, params),
            )
            for choice in range(params.n)
        ]
        return _Job(stem, str(prompt) if is_text else None, ids, answers, time.monotonic())

    def _check(self, ids: tuple[int, ...], params: SamplingParams) -> None:
        vocab_size, limit = self.layout.vocab_size, self.layout.max_model_len
        if not ids:
            raise InvalidRequestError("The prompt is empty.", param="prompts")
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise InvalidRequestError(
                    f"A token id must be an integer, got {token!r}.", param="prompts"
                )
        wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"Token id {wrong} is outside the vocabulary [0, {vocab_size - 1}].",
                param="prompts",
            )
        wanted = len(ids) + (params.max_tokens or 1)
        if wanted > limit:
            raise ContextLengthError(
                f"The prompt has {len(ids)} tokens and max_tokens is {params.max_tokens or 1}: "
                f"{wanted} together, but the context is {limit} tokens.",
                param="prompts",
            )
        params.check_vocabulary(vocab_size)

    def _run(self, jobs: list[_Job], use_progress_bar: bool) -> None:
        """Step until every answer is there; Ctrl-C leaves through `generate`, which aborts."""
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
                    if self._take(job, answer, delta):
                        del open_answers[delta.request_id]
                        progress.advance(task)
                seconds = max(time.monotonic() - clock, 1e-9)
                progress.update(task, speed=f"{num_tokens / seconds:.0f} tok/s")
        self._engine.check_integrity()

    def _take(self, job: _Job, answer: _Answer, delta: TokenDelta) -> bool:
        """Add a delta to its answer; True if the answer is complete."""
        if delta.finish_reason is FinishReason.ERROR:
            raise GenerationError(f"{delta.request_id}: {delta.error}.")
        if delta.prompt_logprobs is not None:
            job.prompt_logprobs = delta.prompt_logprobs
        job.first_token_time = job.first_token_time or time.monotonic()
        text = answer.stream.push(delta)
        answer.text.append(text.text)
        answer.token_ids += text.token_ids
        answer.logprobs += text.logprobs or ()
        if text.finish_reason is None:
            return False
        if text.is_stopped_by_text:
            self._engine.abort(delta.request_id)
        answer.finish_reason, answer.stop_reason = text.finish_reason, text.stop_reason
        job.end_time = time.monotonic()
        return True

    def _output(self, job: _Job) -> RequestOutput:
        first = job.first_token_time or job.start_time
        return RequestOutput(
            request_id=job.request_id,
            prompt=job.prompt,
            prompt_token_ids=job.prompt_token_ids,
            prompt_logprobs=None
            if job.prompt_logprobs is None
            else [
                None if entry is None else self._logprobs(entry) for entry in job.prompt_logprobs
            ],
            outputs=[self._completion(index, answer) for index, answer in enumerate(job.answers)],
            metrics=RequestMetrics(
                ttft_s=first - job.start_time, e2e_s=job.end_time - job.start_time
            ),
        )

    def _completion(self, index: int, answer: _Answer) -> CompletionOutput:
        wants_logprobs = answer.request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(answer.text),
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason.value,
            stop_reason=answer.stop_reason,
            logprobs=[self._logprobs(e) for e in answer.logprobs] if wants_logprobs else None,
            cumulative_logprob=sum(e.logprob for e in answer.logprobs) if wants_logprobs else None,
        )

    def _logprobs(self, entry: TokenLogprob) -> dict[int, Logprob]:
        described = {
            token: Logprob(value, rank, self.tokenizer.token_text(token))
            for rank, (token, value) in enumerate(entry.top, start=1)
        }
        text = self.tokenizer.token_text(entry.token_id)
        return described | {entry.token_id: Logprob(entry.logprob, entry.rank, text)}


@dataclass(slots=True)
class _Answer:
    """One of a prompt's answers while it grows."""

    request: GenerationRequest
    stream: TextStream
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT
    stop_reason: str | int | None = None


@dataclass(slots=True)
class _Job:
    """One prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    answers: list[_Answer]
    start_time: float
    first_token_time: float | None = None
    end_time: float = 0.0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text, one list of ids, or a list of either -> a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a string, token ids, or a list of either, got {prompts!r}.",
            param="prompts",
        )
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [[item for item in items if isinstance(item, int)]]
    made: list[Prompt] = []
    for item in items:
        if not isinstance(item, Sequence):
            raise InvalidRequestError(
                f"A prompt must be a string or a list of token ids, got {item!r}.",
                param="prompts",
            )
        made.append(item)
    return made
