"""The model that a server serves, as the HTTP side sees it, and the threads that tokenize texts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moe_serve.adapters.adapter import Adapter, AdapterVersion
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.engine.request.kv_window import NO_KV_WINDOWS, KVWindowRules
from moe_serve.errors import InvalidRequestError, ModelNotFoundError, ServerOverloadedError
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

MAX_INLINE_CHARS = 4096
# The largest text of each class in characters, and the number of threads of the class. A text waits
# only for texts of its own class, so that a short one never waits for a very long one. A character
# can take 130 bytes while its text is tokenized, so the classes together bound the memory.
_CLASSES = ((65_536, 2), (1_048_576, 1), (None, 1))
_MAX_WAITING_CHARS = 64 * 1024 * 1024
T = TypeVar("T")


class TextThreads:
    """Runs work on texts without blocking the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the count
        self._num_chars = 0  # of the texts that run or wait
        self._classes = [
            (limit, ThreadPoolExecutor(count, "moe-serve-text")) for limit, count in _CLASSES
        ]

    async def run(self, work: Callable[[], T], num_chars: int) -> T:
        """Runs `work`: at once for a short text, else in a thread.

        Raises ServerOverloadedError if too many characters wait already.
        """
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        if self._num_chars and self._num_chars + num_chars > _MAX_WAITING_CHARS:
            raise ServerOverloadedError(
                f"Texts with {self._num_chars} characters are waiting to be tokenized; the limit "
                f"is {_MAX_WAITING_CHARS}. Try again later.",
                retry_after_s=1.0,
            )
        threads = next(each for limit, each in self._classes if limit is None or num_chars <= limit)
        self._count(num_chars)
        future = threads.submit(work)
        future.add_done_callback(lambda _: self._count(-num_chars))
        return await asyncio.wrap_future(future)

    def _count(self, num_chars: int) -> None:
        with self._lock:
            self._num_chars += num_chars


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """The model that a request named, or an adapter of it."""

    name: str
    fingerprint: str | None
    adapter: Adapter | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that a server serves. The command that starts the server fills it.

    `description` is shown in the ready line.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    created: int  # seconds since 1970
    max_model_len: int
    ids_per_token: int = 0  # number of chosen experts: k for each layer with routed experts
    root: str | None = None  # the name of the checkpoint's folder; None: `name`
    fingerprint: str | None = None  # changes when answers could change; None: not known
    tokenizer_info: Mapping[str, Any] | None = None  # None: it is not published
    description: Mapping[str, str] = field(default_factory=dict)
    texts: TextThreads = field(default_factory=TextThreads)
    adapters: AdapterRegistry | None = None  # None: the server has none
    kv_windows: KVWindowRules = NO_KV_WINDOWS

    async def named(self, name: str | None) -> NamedModel:
        """Returns the model or adapter that a request named. The weights of an adapter are read in
        a thread if they are not in memory. Raises ModelNotFoundError.
        """
        self.check_name(name)
        known = None if name is None else self._adapter_name(name)
        if known is None or self.adapters is None:
            return NamedModel(name=self.name, fingerprint=self.fingerprint, adapter=None)
        adapter = self.adapters.in_memory(known)
        if adapter is None:
            adapter = await asyncio.to_thread(self.adapters.acquire, known)
        fingerprint = self.fingerprint
        if fingerprint is not None:
            fingerprint = f"{fingerprint}-{adapter.version.short_digest}"
        return NamedModel(name=known, fingerprint=fingerprint, adapter=adapter)

    def version(self, name: str) -> AdapterVersion | None:
        """Returns the adapter with this name, which may follow the model's name and a colon; None
        if it does not exist.
        """
        known = self._adapter_name(name)
        return None if known is None or self.adapters is None else self.adapters.version(known)

    def _adapter_name(self, name: str) -> str | None:
        if self.adapters is None or name == self.name:
            return None
        for known in (name, name.removeprefix(f"{self.name}:")):
            if self.adapters.version(known) is not None:
                return known
        return None

    def check_name(self, name: str | None) -> None:
        """Checks the model name of a request. A request may leave it out, but must not name
        another."""
        if name is None or name == self.name or self._adapter_name(name) is not None:
            return
        count = 0 if self.adapters is None else len(self.adapters.versions())
        others = f" and {count} adapters, which GET /v1/models lists" if count else ""
        raise ModelNotFoundError(
            f"The model {name[:100]!r} does not exist; this server serves {self.name!r}{others}."
        )

    def require_chat_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequestError(
                f"The model {self.name!r} has no chat template. Use /v1/completions instead.",
                param="messages",
                code="chat_not_supported",
            )
        return self.chat_template
