"""`moe-serve chat`: chats with a running server in the terminal."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field

import typer
from rich.console import Console

from moe_serve.bench.client.plain_text import plain
from moe_serve.cli.client.chat_client import (
    AnswerTiming,
    ChatClient,
    ChatError,
    ChatOptions,
    Message,
)
from moe_serve.cli.client.server_client import sent_key
from moe_serve.cli.options import option, with_options
from moe_serve.config.sources import API_KEY_VARIABLE
from moe_serve.errors import ConfigError

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (gives input() line editing and history)

HELP = "/reset clears the conversation; Ctrl-C stops an answer; /exit or Ctrl-D quits."
# A model's text must not steer the terminal: everything below the space but these two is dropped.
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
