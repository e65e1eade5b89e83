"""`moe-serve trace record`: runs prompts and records the experts that their tokens choose."""

from __future__ import annotations

import os
import shutil
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moe_serve.cli.options import REQUIRED, argument, option, with_options
from moe_serve.cli.serve.ready import loading_bar
from moe_serve.config.sources import load_config
from moe_serve.errors import GenerationError, InvalidRequestError
from moe_serve.json_text import parse_json
from moe_serve.model.hub.hub_name import folder_model_name
from moe_serve.regular_file import regular_file

if TYPE_CHECKING:
    from moe_serve.engine.build import BuiltEngine
    from moe_serve.engine.request.request import GenerationRequest
    from moe_serve.engine.routes.route_recorder import TokenSink
    from routing_predictor.traces.recording import RecordingWriter, TraceHeader


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """A prompt to run: text or token ids, and a label for its kind (a domain, a data set)."""

    prompt: str | list[int]
    label: str = ""


def read_prompts(path: Path) -> list[TracePrompt]:
    """Reads prompts. A file named *.jsonl holds objects {"prompt": ..., "label": ...}; any other
    file one prompt on each line that is not empty. Raises InvalidRequestError."""
    try:
        # Not `splitlines`: JSON may hold U+2028 and the like in a string.
        lines = regular_file(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise _wrong(f"{path} is not UTF-8 text.") from None
    is_json = path.suffix == ".jsonl"
    prompts = [
        _parse(line, f"{path}:{number}") if is_json else TracePrompt(line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise _wrong(f"{path} has no prompts.")
    return prompts


def _parse(line: str, place: str) -> TracePrompt:
    try:
        entry = parse_json(line)
    except (ValueError, RecursionError):
        raise _wrong(f"{place} is not JSON.") from None
    if not isinstance(entry, dict) or entry.keys() - {"prompt", "label"}:
        raise _wrong(f'{place} is not an object {{"prompt": ..., "label": ...}}.')
    prompt, label = entry.get("prompt"), entry.get("label", "")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise _wrong(f"{place}: prompt is neither text nor a list of token ids, or it is empty.")
    if not isinstance(label, str):
        raise _wrong(f"{place}: label is {label!r}, not text.")
    return TracePrompt(prompt, label)


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="prompts")


_EXIT_INTERRUPTED = 130
_SUFFIX = ".safetensors"
_PART_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """The folder of recorded parts, and the one file that they become, if one is wanted."""

    writer: RecordingWriter
    parts: Path
    file: Path | None

    def close(self) -> int:
        """Joins the parts and returns the number of recorded tokens. The parts stay if joining them
        fails."""
        from routing_predictor.traces.routing_error import TraceError
        from routing_predictor.traces.trace_file import read_traces, write_trace

        stats = self.writer.close()
        num_tokens = stats.num_tokens - stats.num_lost_tokens
        if self.file is not None and num_tokens:
            try:
                write_trace(read_traces([self.parts]), self.file)
            except TraceError as error:
                raise TraceError(
                    f"{error}; the tokens recorded so far are in {self.parts}"
                ) from None
            shutil.rmtree(self.parts)
        return num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Options of `trace record`."""

    prompts: Path = option(
        REQUIRED,
        help='Text file with one prompt per line, or *.jsonl file with one {"prompt": ...,'
        ' "label": ...} per line.',
    )
    model: str | None = argument(
        None,
        help="Folder of a checkpoint in Hugging Face layout, or the name of a model on a hub: "
        "OWNER/NAME or OWNER/NAME@REVISION. Default: the demonstration model.",
    )
    out: Path = option(
        Path("trace.safetensors"),
        help=f"File *{_SUFFIX} to write, or a new folder for a recording in several parts.",
    )
    max_tokens: int = option(64, min=1, help="Largest number of tokens in an answer.")
    temperature: float = option(
        0.0, min=0.0, max=2.0, help="Sampling temperature; 0 always takes the most likely token."
    )
    weights: bool = option(
        False, help="Also record the weights that the routers give to the chosen experts."
    )
    tokens: bool = option(True, help="Also record the token ids.")
    config_file: Path | None = option(
        None,
        "--config",
        help="YAML file with the configuration; configs/serve.yaml lists every key.",
    )


@with_options(RecordOptions)
def record(options: RecordOptions) -> None:
    """Answer prompts and record which experts every token chose.

    Ctrl-C ends the recording and keeps the tokens recorded so far.
    """
    for path in (options.out, _parts_of(options.out)):
        if path.exists():
            raise InvalidRequestError(f"{path} already exists: choose another --out.", param="out")
    if not options.out.absolute().parent.is_dir():
        raise InvalidRequestError(f"{options.out.absolute().parent} is not a folder.", param="out")
    chosen = read_prompts(options.prompts)
    flags = {
        "cache.prefix_cache": False,
        **({} if options.model is None else {"model.path": options.model}),
    }
    loaded = load_config(flags=flags, environ=os.environ, file=options.config_file)

    from moe_serve.cluster.started_cells import build_any_engine
    from moe_serve.engine.served_config import served_engine_config
    from moe_serve.engine.tracing import trace_header

    config = served_engine_config(loaded.config.engine)
    with loading_bar(Console(stderr=True)) as progress:
        built = build_any_engine(config, progress)
    try:
        requests = _requests(built, chosen, options.max_tokens, options.temperature)
        folder = built.layout.folder.resolve()
        name = folder_model_name(folder) if config.model.path else "moe-serve-demo"
        header = replace(
            trace_header(built, config, name),
            has_tokens=options.tokens,
            has_weights=options.weights,
        )
        _record(built, requests, _open(options.out, header, chosen), options.out)
    finally:
        built.engine.close()


def _parts_of(out: Path) -> Path:
    """Returns the folder of parts, beside the file into which they are joined."""
    return out.with_suffix(".parts") if out.suffix == _SUFFIX else out


def _open(out: Path, header: TraceHeader, prompts: list[TracePrompt]) -> _Output:
    from routing_predictor.traces.recording import RecordingWriter

    parts = _parts_of(out)
    writer = RecordingWriter(
        parts,
        header,
        part_bytes=_PART_BYTES,
        max_bytes=2**60,
        is_patient=True,
        labels={f"prompt-{number}": each.label for number, each in enumerate(prompts)},
    )
    return _Output(writer=writer, parts=parts, file=None if parts == out else out)


def _record(
    built: BuiltEngine, requests: list[GenerationRequest], output: _Output, out: Path
) -> None:
    """Runs the requests, and writes the recording even if an error or Ctrl-C ends the run."""
    num_tokens, is_interrupted = 0, False
    try:
        _run(built, output.writer, requests, output.writer.has_weights)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        num_tokens = output.close()
    what = "interrupted: " if is_interrupted else ""
    if num_tokens:
        typer.echo(f"{what}{num_tokens} tokens are in {out}; see `moe-serve trace show {out}`")
    else:
        typer.echo(f"{what}nothing was recorded")
    if is_interrupted:
        raise typer.Exit(_EXIT_INTERRUPTED)
    if not num_tokens:
        raise typer.Exit(1)


def _requests(
    built: BuiltEngine, prompts: list[TracePrompt], max_tokens: int, temperature: float
) -> list[GenerationRequest]:
    """Builds the requests. A prompt that does not fit the context with its answer is cut at its
    end."""
    from moe_serve.engine.request.request import GenerationRequest
    from moe_serve.engine.request.sampling_params import SamplingParams
    from moe_serve.text.tokenizer import Tokenizer

    tokenizer, room = Tokenizer.load(built.layout.folder), built.layout.max_model_len - max_tokens
    if room < 1:
        limit = built.layout.max_model_len
        raise InvalidRequestError(
            f"--max-tokens must leave room for a prompt in the context of {limit} tokens, "
            f"got {max_tokens}.",
            param="max_tokens",
        )
    requests, num_cut = [], 0
    for number, each in enumerate(prompts):
        ids = tokenizer.encode(each.prompt) if isinstance(each.prompt, str) else each.prompt
        if not ids or not all(0 <= token < built.layout.vocab_size for token in ids):
            raise InvalidRequestError(
                f"prompt {number + 1} has no tokens, or a token id outside the vocabulary "
                f"[0, {built.layout.vocab_size - 1}].",
                param="prompts",
            )
        num_cut += len(ids) > room
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number)
        requests.append(
            GenerationRequest(
                request_id=f"prompt-{number}", prompt_token_ids=tuple(ids[:room]), params=params
            )
        )
    if num_cut:
        typer.echo(f"{num_cut} prompts are cut to {room} tokens, to fit the context", err=True)
    return requests


def _run(
    built: BuiltEngine,
    sink: TokenSink,
    requests: list[GenerationRequest],
    has_weights: bool,
) -> None:
    from moe_serve.engine.request.request import FinishReason
    from moe_serve.engine.routes.route_recorder import RouteRecorder

    recorder = RouteRecorder(sink, 1.0, has_weights=has_weights)
    built.routes.add(recorder)
    waiting, num_left = deque(requests), len(requests)
    columns = (
        TextColumn("recording"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("recording", total=len(requests))
        while num_left:
            while waiting and built.engine.num_waiting < built.engine.num_seats:
                built.engine.add(waiting.popleft())
            for delta in built.engine.step():
                if delta.finish_reason is FinishReason.ERROR:
                    raise GenerationError(f"{delta.request_id}: {delta.error}.")
                if delta.finish_reason is not None:
                    num_left -= 1
                    progress.advance(task)
