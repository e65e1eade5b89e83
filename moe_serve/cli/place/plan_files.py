"""Reads and writes plan files of any format."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

import numpy as np
import yaml

from experts.placement.errors import NotAPlanError, PlacementError
from experts.placement.formats import trtllm
from experts.placement.formats.engine_plan import EnginePlan, PlanFacts
from experts.placement.formats.plan_text import parse_content, parse_text
from experts.placement.problem.workloads import holds_loads
from moe_serve.config.yaml_nodes import plain_value, read_yaml
from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file
from routing_predictor.importers.torch_file import read_torch_file
from routing_predictor.traces.errors import TraceError

_YAML = (".yaml", ".yml")
_GIVE = (
    "give what `moe-serve place --out` or --export wrote, or a plan of SGLang, vLLM, TensorRT-LLM "
    "or vLLM-Ascend."
)
_YAML_PLAN = re.compile(rf"^{trtllm.ASSIGNMENTS}:", re.MULTILINE)  # whatever its file is called


def read_plan(path: Path, facts: PlanFacts) -> EnginePlan:
    """Reads a plan. Raises ConfigError if the file cannot be read, NotAPlanError if it is not a
    plan, PlacementError if the plan does not fit `facts`."""
    try:
        if path.suffix == ".pt":
            return parse_content(_plain(read_torch_file(path)), facts)
        text = regular_file(path).read_text("utf-8")
        if path.suffix in _YAML or _YAML_PLAN.search(text):
            content = plain_value(read_yaml(text, str(path), is_large=True))
            return parse_content(content, facts)
        return parse_text(text, facts)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise _no_plan(path, "It is not UTF-8 text.") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise _no_plan(path, f"It is not valid YAML ({reason}).") from None
    except TraceError as error:
        raise ConfigError(f"{error}.") from None
    except NotAPlanError as error:
        raise _no_plan(path, str(error)) from None
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from None


def _no_plan(path: Path, reason: str) -> NotAPlanError:
    """Returns an error that says what the file is instead, and what to give."""
    if holds_loads(path):
        return NotAPlanError(f"{path} holds recorded loads and is not a plan; {_GIVE}")
    return NotAPlanError(
        f"{path} is not a plan: {reason[0].lower()}{reason[1:].removesuffix('.')}; {_GIVE}"
    )


def write_text(path: Path, text: str) -> None:
    """Writes a file completely or not at all. Raises ConfigError."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a name that is too long cannot be removed either
            aside.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def _plain(content: object) -> object:
    """Converts the arrays of a recording to lists."""
    if not isinstance(content, dict):
        return content
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in content.items()}
