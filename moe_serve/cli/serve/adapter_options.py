"""The options of `serve` about adapters, with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_serve.cli.options import option

_PANEL = "Adapters"
_MODULES = "--lora-modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """Options about adapters."""

    enable_lora: bool | None = option(
        None,
        "--enable-lora",
        key="adapters.is_enabled",
        help="Serve adapters (LoRA, ESFT, BitDelta), which requests name in their `model` field. "
        "Default: off.",
        rich_help_panel=_PANEL,
    )
    lora_modules: list[str] | None = option(
        None,
        _MODULES,
        key="adapters.modules",
        help="An adapter to load at the start, as NAME=FOLDER. Several may follow one flag. "
        "Default: none.",
        rich_help_panel=_PANEL,
    )
    pin_adapters: list[str] | None = option(
        None,
        "--pin-adapter",
        key="adapters.pinned",
        help="Name of one of --lora-modules whose weights are never dropped for others. May be "
        "given more than once. Default: none.",
        rich_help_panel=_PANEL,
    )
    merge_adapter: str | None = option(
        None,
        key="model.merge_adapter",
        help="Folder of an adapter to merge into the model at the start, for a server of this "
        "fine-tune alone. Default: none.",
        rich_help_panel=_PANEL,
    )
    max_lora_rank: int | None = option(
        None,
        key="adapters.max_rank",
        help="Largest rank of a LoRA. Default: 64.",
        rich_help_panel=_PANEL,
    )


def spread_modules(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the flag before each adapter:
    `--lora-modules a=x b=y` becomes `--lora-modules a=x --lora-modules b=y`."""
    return list(_spread(arguments))


def _spread(arguments: Sequence[str]) -> Iterator[str]:
    is_list, needs_flag = False, False
    for argument in arguments:
        if argument == _MODULES:
            is_list, needs_flag = True, False
        elif is_list and "=" in argument and not argument.startswith("-"):
            if needs_flag:
                yield _MODULES
            needs_flag = True
        else:
            is_list = False
        yield argument
