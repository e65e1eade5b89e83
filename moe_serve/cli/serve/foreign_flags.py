"""Recognises flags of vLLM and SGLang and names the equivalent of this server.

The flags are explained but not accepted: their meaning there seldom equals that of the equivalent
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from moe_serve.cli.serve.adapter_options import spread_modules
from moe_serve.errors import ConfigError


def _set(path: str, value: str = "") -> str:
    """Returns advice to set `path`, a key of the configuration."""
    variable = f"MOE_SERVE_{path.replace('.', '_').upper()}"
    shown = f" to {value}" if value else ""
    return f"set {path}{shown}, in the file of --config or as {variable}"


_MODEL = "give the folder or the name without a flag, as in moe-serve serve MODEL"
_TP = "--attention-tp splits an attention rank, and --expert-ranks splits the experts"
_DP = "--attention-ranks sets how many ranks have their own sequences"
_EP = "--expert-ranks sets how many ranks the experts are split over"
_BALANCE = _set("cluster.rebalance", "auto")
_COPIES = "the file of --placement lists the copies of experts; moe-serve place writes it"
_ROWS = _set("cluster.transport")
_MEMORY = "--num-pages or cache.memory_bytes sets the size of the KV cache"
_DRAFTS = """--speculative-config '{"method": "auto"}'"""
_NODES = "moe-serve launch serves on several nodes"

ADVICE: Mapping[str, str] = {
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--revision": "give it after the name, as in moe-serve serve OWNER/NAME@REVISION",
    "--download-dir": "HF_HOME or HF_HUB_CACHE in the environment chooses the cache",
    "--hf-token": "HF_TOKEN in the environment, or `hf auth login`, gives the token",
    "--max-num-batched-tokens": "--max-batched-tokens",
    "--max-num-queued-reqs": "--max-queued-requests",
    "--max-running-requests": "--max-num-seqs",
    "--tensor-parallel-size": _TP,
    "-tp": _TP,
    "--tp": _TP,
    "--tp-size": _TP,
    "--data-parallel-size": _DP,
    "-dp": _DP,
    "--dp": _DP,
    "--dp-size": _DP,
    "--enable-expert-parallel": _EP,
    "--ep": _EP,
    "--ep-size": _EP,
    "--enable-eplb": _BALANCE,
    "--eplb-config": _BALANCE,
    "--ep-num-redundant-experts": _COPIES,
    "--init-expert-location": _COPIES,
    "--all2all-backend": _ROWS,
    "--moe-a2a-backend": _ROWS,
    "--expert-distribution-recorder-mode": "moe-serve trace records what routers choose",
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--speculative-algorithm": _DRAFTS,
    "--speculative-num-steps": _DRAFTS,
    "--speculative-eagle-topk": _DRAFTS,
    "--speculative-num-draft-tokens": _DRAFTS,
    "--nnodes": _NODES,
    "--dist-init-addr": _NODES,
    "--tool-call-parser": _set("server.tool_parser"),
    "--reasoning-parser": _set("server.reasoning_parser"),
    "--enable-auto-tool-choice": "leave it out: the chat template decides about tools",
    "--chat-template": "leave it out: the checkpoint's chat template is used",
    "--trust-remote-code": "leave it out: code of a checkpoint is never run",
    "--shutdown-timeout": _set("server.drain_timeout_s"),
    "--admin-api-key": _set("server.admin_keys"),
    "--enable-metrics": "leave it out: /metrics is always there",
    "--enable-prefix-caching": "leave it out: cache.prefix_cache is true unless set otherwise",
    "--enable-per-request-metrics": _set("server.request_metrics", "true"),
    "--enable-force-include-usage": _set("server.force_include_usage", "true"),
    "--enable-tokenizer-info-endpoint": _set("server.tokenizer_info", "true"),
    "--fingerprint-mode": "leave it out: answers always have a system_fingerprint",
    "--max-loras": "leave it out: a step takes as many adapters as its requests name",
    "--max-cpu-loras": _set("adapters.memory_bytes"),
    "--max-loaded-loras": _set("adapters.max_adapters"),
    "--lora-paths": "--lora-modules NAME=FOLDER",
    "--max-logprobs": "leave it out: requests get up to 20 and can name more in logprob_token_ids",
    "--enable-prompt-tokens-details": "leave it out: usage always has prompt_tokens_details",
}


class ServerCommand(TyperCommand):
    """A command that starts a server and explains flags of other servers. Flags of its own are
    parsed as usual."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for parameter in self.params for name in parameter.opts}
        check_flags(args, own)
        return super().parse_args(ctx, spread_modules(args))


def check_flags(arguments: Sequence[str], own: set[str]) -> None:
    """Raises ConfigError for the first flag that only another server has."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in ADVICE and flag not in own:
            raise ConfigError(f"{flag} is a flag of other servers; here: {ADVICE[flag]}.")
