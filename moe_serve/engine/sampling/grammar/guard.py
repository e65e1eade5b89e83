"""Asks a worker process whether a constraint can be compiled, and ends it if it takes too long."""

from __future__ import annotations

import logging
import os
import subprocess
import threading

import msgspec

from moe_serve.child_python import module_command
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.compiler import refusal
from moe_serve.engine.sampling.grammar.frames import Compile, Verdict, Words, receive, send
from moe_serve.engine.sampling.grammar.limits import COMPILE_TIMEOUT_S
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary
from moe_serve.errors import MoeServeError

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_COMMAND = module_command("moe_serve.engine.sampling.grammar.worker")


class GuardError(MoeServeError):
    """No worker could be started, so no constraint can be judged now."""


class Guard:
    """Owns one worker for one vocabulary, started at the first question. Questions are asked one at
    a time."""

    def __init__(self, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self.num_ended = 0  # workers ended because of a constraint

    def judge(self, constraint: Constraint, vocabulary: Vocabulary) -> Verdict:
        """Judges a constraint. Never raises for a constraint, whatever it does to the worker."""
        with self._lock:
            return self._judge(constraint, vocabulary)

    def _judge(self, constraint: Constraint, vocabulary: Vocabulary) -> Verdict:
        worker = self._running(vocabulary)
        try:
            answer = self._ask(worker, Compile(constraint), self.timeout_s)
            why = "compiling it takes more memory than is allowed, or fails"
        except TimeoutError:
            answer, why = None, f"compiling it takes longer than {self.timeout_s:g} s"
        if answer is not None:
            return answer
        self._end()
        self.num_ended += 1
        _log.warning("ended a process that compiles grammars: %s", why)
        return Verdict(why=str(refusal(constraint, why)), is_ended=True)

    def close(self) -> None:
        """Ends the worker after its current question. The next question starts a new one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None, "the worker has pipes"
                pipe.close()

    def _running(self, vocabulary: Vocabulary) -> subprocess.Popen[bytes]:
        if self._worker is not None and self._worker.poll() is not None:
            self._end()  # it ended between two questions, not because of a constraint
        if self._worker is None:
            self._worker = self._start(vocabulary)
        return self._worker

    def _start(self, vocabulary: Vocabulary) -> subprocess.Popen[bytes]:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        try:
            worker = subprocess.Popen(
                _COMMAND, stdin=pipe, stdout=pipe, stderr=nothing, bufsize=0, env=environment
            )
        except OSError as error:
            raise GuardError(
                f"The process that compiles grammars cannot be started: {error}."
            ) from None
        self._worker = worker
        words = Words(vocabulary.tokens, tuple(vocabulary.special_ids), vocabulary.eos_ids)
        try:
            answer = self._ask(worker, words, _START_TIMEOUT_S)
        except TimeoutError:
            answer = None
        if answer is None:
            self._end()
            raise GuardError("The process that compiles grammars ended before its first grammar.")
        return worker

    def _ask(
        self, worker: subprocess.Popen[bytes], message: Words | Compile, timeout_s: float
    ) -> Verdict | None:
        """Sends a message and returns the answer; None if the worker has ended."""
        assert worker.stdin is not None and worker.stdout is not None, "the worker has pipes"
        try:
            send(worker.stdin.fileno(), message)
        except BrokenPipeError:
            return None
        content = receive(worker.stdout.fileno(), timeout_s)
        return None if content is None else msgspec.msgpack.decode(content, type=Verdict)
