"""The errors that moe-serve raises for mistakes of its callers and for temporary states.

    MoeServeError
      x InvalidRequestError          a value of one request is wrong: names the field and the limit
        + ContextLengthError         prompt and answer do not fit the model's context
        + InvalidGrammarError        a schema, pattern or grammar for the answer cannot be used
      x ModelNotFoundError           the request names a model that is not served
      x ServerOverloadedError        the queue is full, or the server is draining: try again later
      x TokenizerError               the model's tokenizer fails on a text or on token ids
      x GenerationError              this request failed inside the engine; its neighbours did not
      x EngineDeadError              the engine itself has stopped: the process must end
      x ConfigError                  the configuration is wrong: names key, source and values
      x CheckpointError              the checkpoint cannot be served: names the file and the tensor
      x HubError                     a model cannot be fetched by its name; says why and what to do
        + HubUnreachableError        the hub does not answer, or only with errors of its own
      x ClusterError                 processes of a cluster cannot reach or do not fit each other
        + ChannelClosedError         a control connection has ended; the message says why
      x TracingError                 a recording of the routing cannot start or stop; says why
      x RebalanceError               experts cannot be moved now; says why
      x CellsError                   a cell cannot be added, drained or removed now; says why
        + UnknownCellError           there is no such cell, or no such rank
      x TimelineError                a timeline's file or records are invalid
      x BenchError                   a load, its file, or a report cannot be used
        + BenchServerError           the server under load cannot be reached, or refuses it
        + BenchStreamError           an answer under load breaks the protocol

Our own bugs are `assert`s with a message, never one of these.
"""

from __future__ import annotations

import re

# Terminal controls, text direction marks, other line ends, lone surrogates.
_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[{_STEERING}]")
_UNPRINTABLE_OR_LINE = re.compile(f"[\n{_STEERING}]")
BLANKED = dict.fromkeys((*range(32), *range(127, 160)), " ")  # for str.translate


def printable(text: str, *, keeps_lines: bool = True) -> str:
    r"""Returns the text with its control characters as escapes (\\x1b).

    Messages repeat text of clients and files. Printed unchanged, control characters could steer a
    terminal or forge a line of a log.
    """
    unprintable = _UNPRINTABLE if keeps_lines else _UNPRINTABLE_OR_LINE
    return unprintable.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def plain(text: str, limit: int = 300) -> str:
    """Returns one line without control characters, cut to `limit`: a server's text in a message."""
    return " ".join(text.translate(BLANKED).split())[:limit]


class MoeServeError(Exception):
    """Base of the tree. `str(error)` is one sentence for the person who can act on it."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InvalidRequestError(MoeServeError):
    """A field of a request is wrong. `param` is the field's name as the client wrote it."""

    def __init__(self, message: str, *, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt plus answer, is longer than the context; the message has both numbers.

    `num_prompt_tokens` (a lower bound) and `max_prompt_tokens` are set if the prompt alone is too
    long, for APIs that word the error themselves.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None,
        num_prompt_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens

    def reworded(self, message: str, param: str | None) -> ContextLengthError:
        """Returns the same error with another message."""
        return ContextLengthError(
            message,
            param=param,
            num_prompt_tokens=self.num_prompt_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
        )


class InvalidGrammarError(InvalidRequestError):
    """A constraint on the answer is invalid, too large, or takes too long to compile. `place` is
    the place within the constraint, if known."""

    def __init__(self, message: str, *, param: str | None = "constraint", place: str = "") -> None:
        super().__init__(message, param=param, code="invalid_grammar")
        self.place = place

    def of_field(self, field: str) -> InvalidGrammarError:
        """Returns the error with the request field that the constraint came from."""
        param = f"{field}.{self.place}" if self.place else field
        return InvalidGrammarError(f"{field}: {self}", param=param, place=self.place)


class ModelNotFoundError(MoeServeError):
    """The named model is not served here; the message lists those that are."""


class ServerOverloadedError(MoeServeError):
    """The request was not accepted; `retry_after_s` says when to try again."""

    def __init__(self, message: str, *, retry_after_s: float, is_draining: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_draining = is_draining


class TokenizerError(MoeServeError):
    """The model's tokenizer crashed on a text or on token ids, which the message names."""


class GenerationError(MoeServeError):
    """One request failed inside the engine and was ended; other requests are unaffected."""


class EngineDeadError(MoeServeError):
    """The engine has stopped and cannot serve any more; the message has the cause."""


class ConfigError(MoeServeError):
    """A configuration value is unknown, out of range, or contradicts another."""


class CheckpointError(MoeServeError):
    """A checkpoint is missing a file or a tensor, or holds what this version cannot serve."""


class HubError(MoeServeError):
    """A model cannot be fetched from a hub, or the cache of models cannot be used."""


class HubUnreachableError(HubError):
    """The hub does not answer, breaks off, or answers with errors of its own."""


class ClusterError(MoeServeError):
    """A process of the cluster cannot be reached or does not fit the others; the message names
    it."""


class ChannelClosedError(ClusterError):
    """A control connection has ended: closed by either side, broken, or not read by the other
    side."""


class RebalanceError(MoeServeError):
    """Experts cannot be moved at the moment, or the server gave no answer about it."""


class CellsError(MoeServeError):
    """A cell cannot be added, drained or removed at the moment."""


class UnknownCellError(CellsError):
    """There is no cell or rank with this number or name."""


class TimelineError(MoeServeError):
    """Records or a file of a timeline cannot be read, or lack the requested data."""


class TracingError(MoeServeError):
    """A recording of the routing cannot be started or stopped at the moment."""


class BenchError(MoeServeError):
    """A load cannot be sent as asked, or a file of the load generator cannot be used."""


class BenchServerError(BenchError):
    """The server under load cannot be reached, or refuses before anything is measured."""


class BenchStreamError(BenchError):
    """One answer breaks its protocol; the request counts as failed."""


def shortened(text: str) -> str:
    """Returns the first 80 characters of a value, for a message that names it."""
    return text if len(text) <= 80 else f"{text[:80]}..."


__all__ = [
    "BenchError",
    "BenchServerError",
    "BenchStreamError",
    "CellsError",
    "ChannelClosedError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "ContextLengthError",
    "EngineDeadError",
    "GenerationError",
    "HubError",
    "HubUnreachableError",
    "InvalidGrammarError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "MoeServeError",
    "RebalanceError",
    "ServerOverloadedError",
    "TimelineError",
    "TokenizerError",
    "TracingError",
    "UnknownCellError",
    "printable",
    "shortened",
]
