"""Checks that a folder holds a model that can be served here: its files, and the memory it needs.

This module imports torch, so `doctor` imports it only if a model is given. It reads headers but no
weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from moe_serve.cli.doctor.doctor_checks import Check
from moe_serve.cli.doctor.machine_limits import Fact
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.opened_model import OpenedModel, device_of, model_folder
from moe_serve.errors import MoeServeError
from moe_serve.model.hub.named_model import cached_engine_config
from moe_serve.planning.plan_memory import plan_memory
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

_TIGHT = 0.9  # share of free memory; above it a warning is shown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    facts: Mapping[str, Fact]
    checks: tuple[Check, ...]


def check_model(config: EngineConfig) -> ModelReport:
    """Returns facts and checks of a model. Faults of the folder become checks and are never
    raised."""
    try:
        config = cached_engine_config(config)
        folder = model_folder(config.model)
    except MoeServeError as error:
        return ModelReport(facts={}, checks=(_problem("model", error),))
    facts: dict[str, Fact] = {"folder": str(folder), **_files(folder)}
    checks = list(_texts(folder))
    try:
        num_threads, device = config.model.num_threads or 1, device_of(config.model)
        loader = OpenedModel.open(folder, config.model, num_threads, device).loader
        facts |= {
            "family": loader.spec.family,
            "dtype": str(loader.dtype).removeprefix("torch."),
            "format": loader.weight_format,
        }
    except MoeServeError as error:
        checks.append(_problem("weights", error))
        return ModelReport(facts=facts, checks=tuple(checks))
    checks.append(Check(name="weights", state="ok", text="every tensor is there, as expected"))
    checks.append(_memory(config))
    return ModelReport(facts=facts, checks=tuple(checks))


def _files(folder: Path) -> Mapping[str, Fact]:
    weights = list(folder.glob("*.safetensors"))
    return {
        "weight_files": len(weights),
        "weight_file_bytes": sum(path.stat().st_size for path in weights),
    }


def _texts(folder: Path) -> list[Check]:
    try:
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens)
    except MoeServeError as error:
        return [_problem("tokenizer", error)]
    checks = [Check(name="tokenizer", state="ok", text="it loads")]
    if template is None:
        text = "the checkpoint has none, so /v1/chat/completions is refused; /v1/completions works."
        checks.append(Check(name="chat template", state="warning", text=text))
    return checks


def _memory(config: EngineConfig) -> Check:
    """Returns the memory plan that a server makes before it loads anything, ranks included."""
    try:
        plan = plan_memory(config)
        plan.check()
    except MoeServeError as error:
        return _problem("memory", error)
    is_tight = any(plan.needed(room) > _TIGHT * room.free for room in plan.rooms)
    text = "; ".join(plan.lines()) + ("; steps need some more on top." if is_tight else "")
    return Check(name="memory", state="warning" if is_tight else "ok", text=text)


def _problem(name: str, error: MoeServeError) -> Check:
    return Check(name=name, state="problem", text=str(error))
