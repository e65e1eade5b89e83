"""The model that a server serves, as the HTTP side sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_serve.errors import InvalidRequestError, ModelNotFoundError
from moe_serve.http.generation.text_threads import TextThreads
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer


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

    def check_name(self, name: str | None) -> None:
        """Checks the model name of a request. A request may leave it out, but must not name
        another."""
        if name is not None and name != self.name:
            raise ModelNotFoundError(
                f"The model {name[:100]!r} does not exist; this server serves {self.name!r}."
            )

    def require_chat_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequestError(
                f"The model {self.name!r} has no chat template. Use /v1/completions instead.",
                param="messages",
                code="chat_not_supported",
            )
        return self.chat_template
