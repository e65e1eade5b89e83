"""Runs llama.cpp through the C bindings of llama-cpp-python, whose `Llama` class has no batches."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np

from ..job import Job, Ready
from . import versions

# llama_ftype of the dtypes, and of the variants in few bits.
_FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32, "q4_0": 2, "q8_0": 7}
_GGML_TYPE_F32 = 0


class LlamaCpp:
    """One context with a cell of the KV cache for each token of each sequence."""

    def __init__(self, job: Job) -> None:
        assert job.gguf is not None, "llama.cpp reads a GGUF file"
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            job.gguf.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp cannot read {job.gguf}")
        self._check_dtype(job)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._max_batch = max(job.max_model_len, 2048)
        self._context = llama_cpp.llama_init_from_model(self._model, self._parameters(job))
        if not self._context:
            raise ValueError(f"llama.cpp cannot make a context for {job.gguf}")
        self._batch = llama_cpp.llama_batch_init(self._max_batch, 0, 1)

    def ready(self) -> Ready:
        return Ready(versions=versions("llama-cpp-python"), cache_bytes=None)

    def generate(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        answers = [[token] for token in self._read(prompts)]
        for step in range(num_output - 1):
            rows = [
                (answer[-1], len(prompt) + step, seq, True)
                for seq, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
            for answer, token in zip(answers, self._decode(rows), strict=True):
                answer.append(token)
        return answers

    def _read(self, prompts: list[list[int]]) -> list[int]:
        """Returns the first token of each answer; a batch holds as many whole prompts as fit."""
        firsts: list[int] = []
        rows: list[tuple[int, int, int, bool]] = []
        for seq, prompt in enumerate(prompts):
            if len(rows) + len(prompt) > self._max_batch:
                firsts += self._decode(rows)
                rows = []
            last = len(prompt) - 1
            rows += [(token, pos, seq, pos == last) for pos, token in enumerate(prompt)]
        return firsts + self._decode(rows)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Takes (token, position, sequence, has logits) of each row; returns the best token of
        rows with logits.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, pos, seq, has_logits) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, pos
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, seq
            batch.logits[row] = has_logits
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode answered {code} for {len(rows)} rows")
        return [self._best(row) for row, (*_, has_logits) in enumerate(rows) if has_logits]

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab_size,))))

    def _parameters(self, job: Job) -> llama_cpp.llama_context_params:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = job.max_num_seqs * job.max_model_len
        parameters.n_seq_max = job.max_num_seqs
        parameters.n_batch = self._max_batch
        parameters.n_threads = parameters.n_threads_batch = job.num_threads
        if job.dtype == "float32":  # the cache is fp16 otherwise
            parameters.type_k = parameters.type_v = _GGML_TYPE_F32
        return parameters

    def _check_dtype(self, job: Job) -> None:
        buffer = ctypes.create_string_buffer(16)
        llama_cpp.llama_model_meta_val_str(self._model, b"general.file_type", buffer, len(buffer))
        wanted = str(_FILE_TYPES[job.variant or job.dtype]).encode()
        if buffer.value != wanted:
            raise ValueError(
                f"{job.gguf} has file type {buffer.value.decode()}, not {wanted.decode()} "
                f"({job.dtype}): write it again with write_gguf.py"
            )
