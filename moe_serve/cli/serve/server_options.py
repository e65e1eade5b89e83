"""The options that `serve` and `launch` share. Those with a key are settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_serve.cli.options import option
from moe_serve.cli.serve.event_options import ENDPOINT, event_settings
from moe_serve.errors import ConfigError, shortened

MODEL, LIMITS, HTTP, RUN = "Model", "Limits", "HTTP", "Run"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options about the model."""

    dtype: str | None = option(
        None,
        key="model.dtype",
        help="Number format of weights and activations: auto (the checkpoint's own), "
        "float32, bfloat16 or float16. Default: auto.",
        rich_help_panel=MODEL,
    )
    device: str | None = option(
        None,
        key="model.device",
        help="Device to compute on: auto (cuda if there is a CUDA GPU, else cpu), cpu or "
        "cuda. Default: auto.",
        rich_help_panel=MODEL,
    )
    max_model_len: int | None = option(
        None,
        key="model.max_model_len",
        help="Largest number of tokens in a prompt and its answer together. Default: the "
        "checkpoint's context length.",
        rich_help_panel=MODEL,
    )
    num_threads: int | None = option(
        None,
        key="model.num_threads",
        help="Number of CPU threads for computing, in each process. Default: torch chooses.",
        rich_help_panel=MODEL,
    )
    served_model_name: str | None = option(
        None,
        key="server.served_model_name",
        help="Model name that requests give in their `model` field. Default: the name of "
        "the checkpoint's folder.",
        rich_help_panel=MODEL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options about memory and the size of steps."""

    expert_memory: str | None = option(
        None,
        key="model.expert_memory_bytes",
        help="Memory for expert weights in each process that holds experts, in bytes or as a size "
        "such as 2GiB. Experts that do not fit are read from disk when needed. Default: all "
        "experts stay in memory.",
        rich_help_panel=LIMITS,
    )
    num_pages: int | None = option(
        None,
        key="cache.num_pages",
        help="Size of the KV cache of each attention rank, in pages of cache.page_size (16) "
        "tokens. Default: enough for --max-num-seqs requests of average length.",
        rich_help_panel=LIMITS,
    )
    kv_dtype: str | None = option(
        None,
        key="cache.kv_dtype",
        help="Data type of the KV cache: auto (the model's), int8 or int4. Fewer bits hold more "
        "tokens in the same memory, and answers differ a little. Default: auto.",
        rich_help_panel=LIMITS,
    )
    kv_disk: str | None = option(
        None,
        key="cache.disk_path",
        help="Folder in which computed prefixes survive a restart. It holds data made from "
        "prompts, and only this user may read it. Default: prefixes are kept in memory only.",
        rich_help_panel=LIMITS,
    )
    kv_disk_bytes: str | None = option(
        None,
        key="cache.disk_bytes",
        help="Largest size of the folder of --kv-disk, such as 50GiB. Default: 10GiB.",
        rich_help_panel=LIMITS,
    )
    kv_disk_key_file: str | None = option(
        None,
        key="cache.disk_key_file",
        help=(
            "File of 32 random bytes: the key that encrypts the pages in --kv-disk. Default: the "
            "pages are not encrypted."
        ),
        rich_help_panel=LIMITS,
    )
    max_num_seqs: int | None = option(
        None,
        key="scheduler.max_num_seqs",
        help="Largest number of sequences that a step of an attention rank computes. Default: 64.",
        rich_help_panel=LIMITS,
    )
    max_batched_tokens: int | None = option(
        None,
        key="scheduler.max_batched_tokens",
        help="Largest number of tokens that one step of an attention rank computes; longer "
        "prompts are split into chunks. Default: 1024.",
        rich_help_panel=LIMITS,
    )
    max_queued_requests: int | None = option(
        None,
        key="scheduler.max_queued_requests",
        help="Largest number of waiting requests; further requests get HTTP status 429. "
        "Default: 256.",
        rich_help_panel=LIMITS,
    )
    micro_batches: str | None = option(
        None,
        key="pipeline.micro_batches",
        help="Number of micro-batches to split each step into: 1 to 4, or auto (1 without expert "
        "ranks; with expert ranks, chosen from measured times). Default: auto.",
        rich_help_panel=LIMITS,
    )
    batch_policy: str | None = option(
        None,
        key="scheduler.batch_policy",
        help="Rule that chooses the sequences of a step and splits them into micro-batches: fifo "
        "(order of arrival), balanced (also considers context lengths) or expert-aware (also "
        "considers the predicted experts). Default: fifo.",
        rich_help_panel=LIMITS,
    )
    predictor: str | None = option(
        None,
        key="predictor.path",
        help="Folder of routing predictors, written by `moe-serve predictor train`. Default: no "
        "trained predictors; the experts of a request are predicted from those it has used so far.",
        rich_help_panel=LIMITS,
    )
    speculative_config: str | None = option(
        None,
        key="speculation.method",
        help="Speculative decoding, as a JSON object with vLLM's keys: method (off, auto, ngram, "
        "suffix, head, mtp or self), num_speculative_tokens, prompt_lookup_min, prompt_lookup_max, "
        "model (folder of a drafting head). Answers stay the same. Default: auto.",
        rich_help_panel=LIMITS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Options about the address to listen on."""

    host: str | None = option(
        None,
        key="server.host",
        help="Address to listen on. Addresses that other machines can reach require --api-key. "
        "Default: 127.0.0.1.",
        rich_help_panel=HTTP,
    )
    port: int | None = option(
        None,
        key="server.port",
        help="Port to listen on; 0 chooses a free port. Default: 8000.",
        rich_help_panel=HTTP,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options about metrics, traces and TLS."""

    metrics_alias: str | None = option(
        None,
        key="server.metrics_alias",
        help="Additional names in /metrics: none, or vllm (also report the values under vLLM's "
        "metric names). Default: none.",
        rich_help_panel=HTTP,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        key="server.otlp_traces_endpoint",
        help="URL of an OpenTelemetry collector that receives request traces (OTLP over "
        "HTTP), such as http://127.0.0.1:4318/v1/traces. Default: no traces are sent.",
        rich_help_panel=HTTP,
    )
    ssl_certfile: str | None = option(
        None,
        key="server.ssl_certfile",
        help="PEM file with the certificate chain; switches on HTTPS. Default: plain HTTP.",
        rich_help_panel=HTTP,
    )
    ssl_keyfile: str | None = option(
        None,
        key="server.ssl_keyfile",
        help="PEM file with the certificate's private key. Default: the key is in --ssl-certfile.",
        rich_help_panel=HTTP,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options about the run."""

    log_format: str | None = option(
        None,
        key="log.format",
        help="Format of the log on standard error: text or json (one object per line). "
        "Default: text.",
        rich_help_panel=RUN,
    )
    config_file: Path | None = option(
        None,
        "--config",
        help="YAML file with the configuration; configs/serve.yaml lists every key.",
        rich_help_panel=RUN,
    )
    print_config: bool = option(
        False,
        "--print-config",
        help="Print the effective configuration with the source of each value, and exit.",
        rich_help_panel=RUN,
    )


_NUMBERS_OR_WORDS = ("model.expert_memory_bytes", "cache.disk_bytes", "pipeline.micro_batches")


def flag_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Turns the text of flags into values: numbers of keys that take a number or a word, such as
    auto, and the JSON of --speculative-config and --kv-events-config. Raises ConfigError."""
    values = {
        key: int(value)
        if key in _NUMBERS_OR_WORDS and isinstance(value, str) and value.isdecimal()
        else value
        for key, value in settings.items()
    }
    if (text := values.pop(_METHOD, None)) is not None:
        values |= speculative_settings(str(text))
    if (text := values.pop(ENDPOINT, None)) is not None:
        values |= event_settings(str(text))
    return values


_METHOD = "speculation.method"
_SPECULATIVE_KEYS = {  # vLLM's names
    "method": _METHOD,
    "num_speculative_tokens": "speculation.max_tokens",
    "prompt_lookup_min": "speculation.prompt_lookup_min",
    "prompt_lookup_max": "speculation.prompt_lookup_max",
    "model": "speculation.head",
}
_MTP = ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "exaone_moe_mtp")
_OTHER_SPELLINGS = {"[ngram]": "ngram", **dict.fromkeys(_MTP, "mtp")}  # of vLLM
_WITHOUT_EQUAL = {
    "suffix_decoding_max_cached_requests": "set speculation.suffix_max_tokens, which counts tokens",
    "suffix_decoding_max_tree_depth": "leave it out: the depth is fixed",
    "suffix_decoding_max_spec_factor": "leave it out: measured step times decide",
    "suffix_decoding_min_token_prob": "leave it out: measured acceptance decides",
    "num_speculative_tokens_per_batch_size": "leave it out: measured step times decide",
}


def speculative_settings(text: str) -> dict[str, object]:
    """Reads the JSON of --speculative-config, {vLLM's key: value}, as settings. Raises
    ConfigError."""
    known = f"its keys are {', '.join(_SPECULATIVE_KEYS)}"
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(
            f"--speculative-config takes a JSON object, got {shortened(repr(text))}; {known}, as "
            """in --speculative-config '{"method": "auto"}'."""
        )
    for name in given:
        if name not in _SPECULATIVE_KEYS:
            advice = _WITHOUT_EQUAL.get(name)
            raise ConfigError(
                f"--speculative-config does not take {shortened(repr(name))}"
                f"{f' ({advice})' if advice else ''}; {known}."
            )
    if "method" not in given:
        raise ConfigError(
            "--speculative-config needs a method: off, auto, ngram, suffix, head, mtp or self, as "
            """in --speculative-config '{"method": "auto"}'."""
        )
    given["method"] = _OTHER_SPELLINGS.get(str(given["method"]), given["method"])
    return {_SPECULATIVE_KEYS[name]: value for name, value in given.items()}
