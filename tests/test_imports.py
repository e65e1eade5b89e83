"""Imports run one way, there is no circle, and starting the CLI loads nothing heavy.

    cli -> http, offline -> engine, cluster -> pipeline, cache, model -> experts, routing_predictor
        -> moe_kernels

Function-level and TYPE_CHECKING imports count too: neither may hide a circle.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("moe_serve", "experts", "routing_predictor", "kernels/moe_kernels")

# A room may import rooms of its own number and lower; no two modules may form a circle.
LAYERS: Mapping[str, int] = {
    "moe_serve.__main__": 7,
    "moe_serve.cli": 6,
    "moe_serve.http": 5,
    "moe_serve.offline": 5,
    "moe_serve.bench": 5,
    "moe_serve.fleet": 5,
    "moe_serve.planning": 4,
    "moe_serve.simulate": 4,
    "moe_serve.cluster": 4,
    "moe_serve.engine": 4,
    "moe_serve.learn": 4,
    "moe_serve.quantize": 4,
    "moe_serve.pipeline": 3,
    "moe_serve.cache": 3,
    "moe_serve.adapters": 3,
    "moe_serve.model": 3,
    "experts": 2,
    "routing_predictor": 2,
    "moe_kernels": 1,
}
# The rooms of each wing, lowest first: a room may import itself and those before it. A module that
# lies beside the rooms and is not named here comes after all of them.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "moe_serve.http": (
        "schema",
        "pages",
        "wire",
        "gate",
        "metrics",
        "generation",
        "anthropic",
        "openai",
        "dashboard",
        "admin",
    ),
    "moe_serve.cli": (
        "console",
        "options",
        "server_client",
        "models",
        "serve",
        "run_batch",
        "top",
        "bench",
        "doctor",
        "launch",
        "predictor",
        "quantize",
        "place",
        "trace",
    ),
    "moe_serve.adapters": (
        "adapter_files",
        "targets",
        "adapter_part",
        "load_rests",
        "peft_config",
        "peft_lora",
        "low_rank",
        "bitdelta",
    ),
    "moe_serve.bench": ("figures", "workload", "client", "report"),
    "moe_serve.cluster": (
        "control",
        "members",
        "launch",
        "rebalance",
        "ranks",
        "steps",
        "parcels",
        "autoscale",
        "cells",
    ),
    "moe_serve.engine": (
        "memory",
        "request",
        "sampling",
        "routes",
        "drafting",
        "service",
        "schedule",
        "execute",
        "watch",
    ),
    "moe_serve.pipeline": (
        "timeline",
        "frames",
        "transport",
        "links",
        "exchange",
        "route_tap",
        "stacked_layers",
        "groups",
        "rank_turns",
        "pipeline",
        "costs",
        "graphs",
    ),
    "moe_serve.model": (
        "rope",
        "step_plan",
        "spec",
        "stage",
        "checkpoint",
        "formats",
        "families",
        "load",
        "hub",
    ),
    "experts": ("expert_layer", "memory", "placement"),
    "experts.placement": (
        "placement_error",
        "replicas",
        "problem",
        "judge",
        "solution",
        "plan_file",
        "formats",
        "solvers",
    ),
    "routing_predictor": (
        "traces",
        "torch_files",
        "importers",
        "layers",
        "requests",
        "predictor_file",
        "judge",
    ),
    "moe_kernels": ("graphs", "interface", "cpu", "gpu", "reference"),
}
# Leaves: what each may import of ours, whoever imports it. `moe_serve` itself is the version.
LEAVES: Mapping[str, frozenset[str]] = {
    # The lazy public names.
    "moe_serve": frozenset({"moe_serve.offline", "moe_serve.engine"}),
    "moe_serve.errors": frozenset(),
    "moe_serve.clock": frozenset(),
    "moe_serve.child_python": frozenset(),
    "moe_serve.config": frozenset({"moe_serve.errors", "moe_serve.regular_file"}),
    "moe_serve.json_text": frozenset(),
    "moe_serve.regular_file": frozenset(),
    "moe_serve.text": frozenset(
        {
            "moe_serve.errors",
            "moe_serve.child_python",
            "moe_serve.json_text",
            "moe_serve.regular_file",
        }
    ),
}
# The one exception: text/ turns the engine's deltas into text, so it reads these frozen objects.
BOUNDARIES = frozenset(
    {"moe_serve.engine.request.request", "moe_serve.engine.request.sampling_params"}
)
STANDALONE = ("experts", "routing_predictor", "moe_kernels")  # usable without moe_serve
# What a function may import: backends that are heavy, optional, or both.
BACKENDS = frozenset(
    {
        "triton",
        "deepspeed",
        "transformers",
        "matplotlib",
        "sklearn",
        "scipy",
        "cryptography",
        "opentelemetry",
        "zmq",
        "huggingface_hub",
        "nixl",
    }
)
HEAVY = (
    "torch",
    "triton",
    "deepspeed",
    "transformers",
    "numpy",
    "fastapi",
    "pydantic",
    "huggingface_hub",
)


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement: `module` imports `target`."""

    module: str
    target: str
    place: str  # file:line
    is_in_function: bool


@cache
def modules() -> dict[str, Path]:
    """Returns every module of the project by its dotted name."""
    found = {}
    for source in SOURCES:
        base = (ROOT / source).parent
        for path in sorted((ROOT / source).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text("utf-8"), str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, is_in_function in _statements(tree, False):
        for target in _targets(node, package):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            yield Import(name, target, place, is_in_function)


def _statements(parent: ast.AST, is_in_function: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yields the statements below a node, and whether each is in a function. It does not look into
    expressions, which are most of a tree and import nothing."""
    is_in_function |= isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef)
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(parent, block, ()):
            yield node, is_in_function
            yield from _statements(node, is_in_function)


def _targets(node: ast.AST, package: str) -> Iterator[str]:
    """Yields imported names: `from a.b import c` gives a.b.c, and `module_of` decides if c is a
    module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def module_of(target: str, known: Mapping[str, Path]) -> str | None:
    """Returns the longest prefix of `target` that is one of our modules."""
    while target and target not in known:
        target = target.rpartition(".")[0]
    return target or None


def room_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "moe_serve" else parts[0]


@cache
def all_imports() -> list[Import]:
    return [item for name, path in modules().items() for item in imports(name, path)]


def own_imports() -> list[tuple[Import, str]]:
    """Returns the imports of our modules by our modules, with the name of the imported one."""
    return [
        (item, target)
        for item in all_imports()
        if (target := module_of(item.target, modules())) is not None and target != item.module
    ]


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(module) for module in modules()}
    unknown = rooms - LAYERS.keys() - LEAVES.keys()
    assert not unknown, f"say in LAYERS or LEAVES where these belong: {sorted(unknown)}"


def test_imports_run_downwards() -> None:
    wrong = []
    for item, target in own_imports():
        source, goal = room_of(item.module), room_of(target)
        if source == goal or (goal in LEAVES and source not in LEAVES and goal != "moe_serve"):
            continue
        if source in LEAVES:
            is_boundary = source == "moe_serve.text" and target in BOUNDARIES
            is_allowed = goal in LEAVES[source] or is_boundary
        elif goal == "moe_serve":
            is_allowed = item.target in ("moe_serve", "moe_serve.__version__")
        else:
            is_allowed = LAYERS[goal] <= LAYERS[source]
        if not is_allowed:
            wrong.append(f"{item.place}: {source} imports {item.target}")
    assert not wrong, "\n".join(wrong)


def place_in(wing: str, module: str) -> int:
    """Returns how high the room of a module lies in its wing."""
    room = module.removeprefix(f"{wing}.").split(".")[0]
    rooms = ROOMS[wing]
    return rooms.index(room) if room in rooms else len(rooms)


def test_rooms_import_downwards() -> None:
    wrong = [
        f"{item.place}: imports {item.target}, a room above its own in {wing}"
        for wing in ROOMS
        for item, target in own_imports()
        if item.module.startswith(f"{wing}.")
        and target.startswith(f"{wing}.")
        and place_in(wing, target) > place_in(wing, item.module)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_says_what_lives_in_it() -> None:
    folders = {path.parent for path in modules().values()}
    silent = [
        str(folder.relative_to(ROOT))
        for folder in sorted(folders)
        if not (folder / "__init__.py").is_file()
        or ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) is None
    ]
    assert not silent, f"say in an __init__.py what lives in {silent}"


def test_the_expert_side_stands_alone() -> None:
    wrong = [
        f"{item.place}: imports {item.target}"
        for item in all_imports()
        if room_of(item.module) in STANDALONE and item.target.split(".")[0] == "moe_serve"
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_form_no_circle() -> None:
    edges: dict[str, set[str]] = {}
    for item, target in own_imports():
        if "moe_serve" not in (item.module, target):  # the facade's lazy names
            edges.setdefault(item.module, set()).add(target)
    assert find_circle(edges) is None, f"modules import in a circle: {find_circle(edges)}"


def test_functions_import_only_backends() -> None:
    """The CLI's commands and the lazy facade may import modules when they run."""
    wrong = [
        f"{item.place}: {item.target}"
        for item in all_imports()
        if item.is_in_function
        and item.module != "moe_serve"
        and room_of(item.module) != "moe_serve.cli"
        and item.target.split(".")[0] not in BACKENDS
        and "triton" not in item.target
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["moe_serve", "moe_serve.cli.main"])
def test_start_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"import {module} loads {done.stdout.strip()}"


def test_an_engine_on_a_cpu_loads_no_triton() -> None:
    """Only a choice of the Triton kernels imports them."""
    # a copy of the template process, which has imported the server and no more
    command = [sys.executable, "-m", "tests.support.kernels.loaded_on_cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"loaded: {done.stdout.strip()}"


def find_circle(edges: Mapping[str, set[str]]) -> list[str] | None:
    """Returns one circle as [a, b, ..., a], or None.

    Depth first: `path` is the way from `start` to the current module; `done` holds modules that
    lead to no circle.
    """
    done: set[str] = set()
    for start in sorted(edges):
        path: list[str] = []
        stack = [(start, iter(sorted(edges[start])))] if start not in done else []
        path.extend(name for name, _ in stack)
        while stack:
            name, rest = stack[-1]
            following = next((other for other in rest if other not in done), None)
            if following is None:
                done.add(name)
                stack.pop()
                path.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            else:
                path.append(following)
                stack.append((following, iter(sorted(edges.get(following, ())))))
    return None


def test_find_circle() -> None:
    assert find_circle({"a": {"b", "c"}, "b": {"c"}}) is None
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
