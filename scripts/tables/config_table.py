"""Renders the tables of docs/reference/configuration.md from the configuration.

    PYTHONPATH=scripts python -m tables.config_table            print them
    PYTHONPATH=scripts python -m tables.config_table --write    put them into the page

Keys, defaults and ranges come from the program, flags from `moe-serve serve`, meanings from the
comments in configs/serve.yaml. tests/scripts/test_tables.py compares the page with this
output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import typer.main
import yaml

from moe_serve.cli.main import app
from moe_serve.config.keys import ConfigKey, config_keys
from moe_serve.config.sources import variable_name
from tables.page_block import PageBlock

ROOT = Path(__file__).resolve().parents[2]
BLOCK = PageBlock(
    page=ROOT / "docs" / "reference" / "configuration.md",
    start="<!-- config-table: start -->",
    end="<!-- config-table: end -->",
)
EXAMPLE = ROOT / "configs" / "serve.yaml"
HEADER = "| key and variable | flag | default | takes | meaning |"
PARAMETER_OF = {
    "cells.layout": "cells",
    "cluster.host": "",  # --host and --port set server.host and server.port
    "cluster.port": "",
    "cache.disk_path": "kv_disk",
    "cache.disk_bytes": "kv_disk_bytes",
    "cache.disk_key_file": "kv_disk_key_file",
    "model.expert_memory_bytes": "expert_memory",
    "kv_events.endpoint": "kv_events_config",
    "kv_events.replay_endpoint": "kv_events_config",
    "kv_events.topic": "kv_events_config",
    "kv_events.buffer_steps": "kv_events_config",
    "kv_events.hwm": "kv_events_config",
    "log.format": "log_format",
    "adapters.is_enabled": "enable_lora",
    "adapters.modules": "lora_modules",
    "adapters.pinned": "pin_adapters",
    "adapters.max_rank": "max_lora_rank",
    "model.path": "model",
    "server.api_keys": "api_key",
    "predictor.path": "predictor",
    "speculation.method": "speculative_config",
    "speculation.max_tokens": "speculative_config",
    "speculation.prompt_lookup_min": "speculative_config",
    "speculation.prompt_lookup_max": "speculative_config",
}  # else: the key's own name
_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):[^#]*(?:# *(?P<comment>.*))?")


def comments(text: str) -> dict[str, str]:
    """Returns {"section": comment, "section.name": comment} of a YAML file of two levels."""
    found: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            if not match["indent"]:
                section = match["name"]
            path = f"{section}.{match['name']}" if match["indent"] else section
            found[path] = (match["comment"] or "").strip()
    return found


def serve_parameters() -> dict[str, str]:
    """Returns the flag of each parameter of `moe-serve serve`: {"port": "--port"}."""
    command = typer.main.get_group(app).commands["serve"]
    return {
        str(parameter.name): parameter.opts[0]
        for parameter in command.params
        if parameter.name not in ("help", "config_file", "print_config")
    }


def flag_of(key: ConfigKey, parameters: Mapping[str, str]) -> str:
    """Returns the flag that sets the key, `MODEL` for the argument, or an empty text."""
    spelled = parameters.get(PARAMETER_OF.get(key.path, key.name), "")
    return spelled.upper() if spelled and not spelled.startswith("-") else spelled


def render() -> str:
    """Returns one table per section."""
    meanings = comments(EXAMPLE.read_text("utf-8"))
    parameters = serve_parameters()
    lines: list[str] = []
    for section in dict.fromkeys(key.section for key in config_keys()):
        about = f": {meanings[section]}" if meanings.get(section) else ""
        lines += [f"### `{section}`{about}", ""]
        lines += [HEADER, "|---|---|---|---|---|"]
        for key in config_keys():
            if key.section == section:
                lines.append(_row(key, flag_of(key, parameters), meanings.get(key.path, "")))
        lines.append("")
    return "\n".join(lines)


def _row(key: ConfigKey, flag: str, meaning: str) -> str:
    default = yaml.safe_dump(key.plain(key.default), default_flow_style=True).split("\n")[0]
    names = f"`{key.name}`<br>`{variable_name(key)}`"
    cells = (names, f"`{flag}`" if flag else "", f"`{default}`", key.allowed, meaning)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    BLOCK.main(render, "The tables of docs/reference/configuration.md.")
