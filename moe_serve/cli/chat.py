"""`moe-serve chat`: chats with a running server in the terminal, one streamed answer at a time."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import typer
from rich.console import Console

from moe_serve.cli.options import option, with_options
from moe_serve.cli.server_client import NotReachedError, ServerClient, refusal, sent_key
from moe_serve.config.sources import API_KEY_VARIABLE
from moe_serve.errors import ConfigError, plain

MIN_TIMED_TOKENS = 8  # Fewer tokens may arrive in one piece, which says nothing about their rate.
_LONGEST = 2000  # characters of a message from the server
_TOKENS = (
    "content",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "refusal",
)  # fields of a delta that hold tokens


class ChatError(Exception):
    """The server could not be reached or refused the request. `str(error)` is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of the conversation, with the field names of the API."""

    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Sampling options from the command line; None leaves an option to the server."""

    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(slots=True)
class AnswerTiming:
    """Times of one answer in seconds since the request was sent, filled while it streams."""

    num_tokens: int | None = None  # from the server's usage, which comes last
    first_s: float | None = None
    last_s: float | None = None

    def summary(self) -> str:
        """Returns text like "42 tokens, 61.3 tokens/s, first after 35 ms", with the known
        values."""
        parts = [] if self.num_tokens is None else [f"{self.num_tokens} tokens"]
        if self.first_s is not None and self.last_s is not None:
            duration = self.last_s - self.first_s
            if self.num_tokens is not None and self.num_tokens >= MIN_TIMED_TOKENS and duration:
                parts.append(f"{(self.num_tokens - 1) / duration:.1f} tokens/s")
            parts.append(f"first after {self.first_s * 1000:.0f} ms")
        return ", ".join(parts)


class ChatClient:
    """A client of the server at `url`. Close it, or use `with`."""

    def __init__(
        self, url: str, api_key: str | None, transport: httpx.BaseTransport | None = None
    ) -> None:
        timeout = httpx.Timeout(600.0, connect=5.0)
        self._server = ServerClient(url, api_key, timeout, transport)
        self.url = self._server.url

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()

    def model(self) -> str:
        """Returns the name of the model that the server serves."""
        try:
            response = self._server.request("GET", "/v1/models")
            self._raise_for_status(response)
            models = response.json()["data"]
            return str(models[0]["id"])
        except NotReachedError as error:
            raise ChatError(str(error)) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ChatError(f"{self.url} answers, but not like an OpenAI-compatible server.") from (
                error
            )

    def answer(
        self,
        model: str,
        messages: Sequence[Message],
        options: ChatOptions,
        timing: AnswerTiming,
    ) -> Generator[str, None, None]:
        """Yields the pieces of the answer as they arrive. Closing the iterator aborts the
        request."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": item.role, "content": item.content} for item in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        if not all(_is_text(item.content) for item in messages):
            raise ChatError("the message has bytes that are not UTF-8; nothing was sent.")
        start = time.perf_counter()
        try:
            with self._server.stream("/v1/chat/completions", body) as response:
                if response.is_error:
                    response.read()
                self._raise_for_status(response)
                for event in sse_events(response.iter_lines()):
                    delta = _delta_of(event, timing)
                    if any(delta.get(name) for name in _TOKENS):
                        timing.last_s = time.perf_counter() - start
                        timing.first_s = timing.first_s or timing.last_s
                    if text := str(delta.get("content") or ""):
                        yield text
        except httpx.HTTPError as error:
            raise ChatError(str(self._server.unreachable(error))) from error

    def _raise_for_status(self, response: httpx.Response) -> None:
        if response.is_error:
            raise ChatError(refusal(response, response.reason_phrase))


def _is_text(content: str) -> bool:
    """Returns whether the text is valid UTF-8: other bytes from a terminal or pipe arrive as lone
    surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in content)


def sse_events(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """Yields the JSON objects of a stream of server-sent events, up to `[DONE]`."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # a comment (": ping"), an event name, or the empty line between events
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ChatError(
                f"the server sent an event that is not JSON: {plain(data, 80)}"
            ) from error
        if isinstance(event, dict):
            yield event
    raise ChatError("the connection ended before the answer did.")


def _delta_of(event: Mapping[str, Any], timing: AnswerTiming) -> Mapping[str, Any]:
    """Returns the delta of an event. Its usage, which counts the tokens of all kinds, goes into
    `timing`."""
    if error := event.get("error"):
        said = error.get("message", error) if isinstance(error, dict) else error
        raise ChatError(f"the server ended the answer: {plain(str(said), _LONGEST)}")
    try:
        if isinstance(number := (event.get("usage") or {}).get("completion_tokens"), int):
            timing.num_tokens = number
        choices = event.get("choices") or [{}]
        delta: Mapping[str, Any] = choices[0].get("delta") or {}
        delta.get("content")
    except (AttributeError, LookupError, TypeError):
        raise ChatError(
            f"the server sent an event of another kind: {plain(str(event), 80)}"
        ) from None
    return delta


with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (gives input() line editing and history)

HELP = "/reset clears the conversation; Ctrl-C stops an answer; /exit or Ctrl-D quits."
# A model's text must not control the terminal: of the characters below the space, only these two
# are kept.
PRINTABLE_CONTROLS = (ord("\n"), ord("\t"))
DROPPED = {code: None for code in (*range(32), *range(127, 160)) if code not in PRINTABLE_CONTROLS}

_err = Console(stderr=True, highlight=False)


@dataclass(slots=True)
class Conversation:
    """The turns of a conversation so far. A turn that the server refused is not kept in
    `messages`."""

    client: ChatClient
    model: str
    options: ChatOptions
    system: str | None
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        self.messages = []
        if self.system is not None:
            self.messages.append(Message(role="system", content=self.system))

    def ask(self, text: str) -> None:
        """Sends one turn and prints the answer as it arrives; Ctrl-C keeps the part that has
        arrived."""
        turn = [*self.messages, Message(role="user", content=text)]
        timing = AnswerTiming()
        pieces: list[str] = []
        answer = self.client.answer(self.model, turn, self.options, timing)
        try:
            for piece in answer:
                pieces.append(piece)
                sys.stdout.write(piece.translate(DROPPED))
                sys.stdout.flush()
            self._end_turn(turn, pieces)
        except KeyboardInterrupt:
            self._end_turn(turn, pieces)
            raise
        except ChatError:
            if pieces:  # the error message begins on a new line
                sys.stdout.write("\n")
                sys.stdout.flush()
            raise
        finally:
            answer.close()  # leaving early hangs up, and the server aborts the request
        if summary := timing.summary():
            _err.print(summary, style="dim")

    def _end_turn(self, turn: list[Message], pieces: list[str]) -> None:
        self.messages = [*turn, Message(role="assistant", content="".join(pieces))]
        sys.stdout.write("\n")
        sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommandOptions:
    """Options of `chat`."""

    message: str | None = option(
        None,
        "--message",
        "-m",
        help="Send this message, print the answer and exit. Default: an interactive conversation.",
    )
    url: str = option("http://127.0.0.1:8000", help="URL of the server.")
    api_key: str | None = option(
        None, envvar=API_KEY_VARIABLE, help="API key of the server, or @FILE with the key."
    )
    system: str | None = option(
        None, help="System message at the start of the conversation. Default: none."
    )
    temperature: float | None = option(
        None,
        min=0.0,
        max=2.0,
        help="Sampling temperature; 0 always takes the most likely token. Default: the server's.",
    )
    max_tokens: int | None = option(
        None, min=1, help="Largest number of tokens in an answer. Default: the server's."
    )


@with_options(ChatCommandOptions)
def chat(options: ChatCommandOptions) -> None:
    """Chat with a running server in the terminal. Answers appear while they are generated.

    If standard input is a pipe or a file, its whole text is sent as one message.
    """
    api_key, message = sent_key(options.api_key), options.message
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message == "":
        raise ConfigError("there is no message: give --message TEXT, or text on standard input.")
    sampling = ChatOptions(temperature=options.temperature, max_tokens=options.max_tokens)
    try:
        with ChatClient(options.url, api_key) as client:
            conversation = Conversation(client, client.model(), sampling, options.system)
            conversation.reset()
            if message is not None:
                conversation.ask(message)
            else:
                _talk(conversation)
    except ChatError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _talk(conversation: Conversation) -> None:
    """Asks turn after turn until Ctrl-D or /exit. A refused turn is reported and can be asked
    again."""
    name = plain(conversation.model)
    _err.print(f"{name} at {conversation.client.url}. {HELP}", style="dim", markup=False)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            _err.print("The conversation was cleared.", style="dim")
        elif text.startswith("/"):
            _err.print(f"{text.split()[0]} is not a command. {HELP}", style="dim", markup=False)
        elif text:
            try:
                conversation.ask(text)
            except KeyboardInterrupt:
                _err.print("stopped", style="dim")
            except ChatError as error:
                _err.print(f"error: {error}", style="red", markup=False)
