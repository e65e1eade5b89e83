"""Fails where Python code could run code from data: pickle, eval, torch.load, a shell.

    python scripts/forbidden_calls.py

Reads syntax trees, not text: `model.eval()` and a comment that says "no pickle" are fine.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOTS = (
    "moe_serve",
    "experts",
    "routing_predictor",
    "kernels",
    "scripts",
    "benchmarks",
    "tests",
)
# These names are what this program looks for; it calls none of them.
MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"})
BUILTINS = frozenset({"eval", "exec", "__import__"})
METHODS = frozenset(
    {
        "torch.load",
        "torch.save",
        "torch.hub",
        "yaml.load",
        "yaml.load_all",
        "yaml.unsafe_load",
        "yaml.full_load",
        "os.system",
        "os.popen",
    }
)
ATTRIBUTES = frozenset(  # methods that pickle: refused wherever one is called, called nowhere
    {"send_pyobj", "recv_pyobj", "send_object_list", "recv_object_list", "broadcast_object_list"}
    | {"all_gather_object", "gather_object", "scatter_object_list"}
)
# The last names of both: most attributes have another one, and are not spelled out.
LAST_NAMES = ATTRIBUTES | {method.rpartition(".")[2] for method in METHODS}
# Files that a converter reads without running them have to be written for its tests.
ALLOWED = frozenset({("tests/adapters/test_bitdelta_convert.py", "torch.save")})
KEYWORDS = frozenset({"shell", "allow_pickle", "trust_remote_code"})


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Returns (line, description) for each forbidden import, call or keyword."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield node.lineno, f"from {node.module} import"
        elif isinstance(node, ast.Attribute) and node.attr in LAST_NAMES:
            name = ast.unparse(node)
            if name in METHODS or node.attr in ATTRIBUTES:
                yield node.lineno, name
        elif isinstance(node, ast.Call):
            yield from _call_findings(node)


def _call_findings(node: ast.Call) -> Iterator[tuple[int, str]]:
    if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
        yield node.lineno, f"{node.func.id}()"
    for keyword in node.keywords:
        if keyword.arg in KEYWORDS and not _is_false(keyword.value):
            yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def main() -> int:
    num_files = num_findings = 0
    for root in ROOTS:
        for path in sorted(Path(root).rglob("*.py")):
            num_files += 1
            for line, what in findings(ast.parse(path.read_text("utf-8"), str(path))):
                if (path.as_posix(), what) in ALLOWED:
                    continue
                num_findings += 1
                print(f"{path}:{line}: {what}: data must not become code")
    print(f"{num_files} files, {num_findings} forbidden calls")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
