"""How large the files and functions are: prints the figures, fails above the ceilings.

    python scripts/structure.py

Counts whole lines, docstrings and comments included. Tests are reported and held to no ceiling.
"""

from __future__ import annotations

import ast
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("moe_serve", "experts", "routing_predictor", "kernels", "scripts", "benchmarks")
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True, slots=True)
class Size:
    """Lines of one file, or of one function in it."""

    where: str
    num_lines: int


def file_sizes(folder: Path) -> list[Size]:
    paths = sorted(folder.rglob("*.py"))
    return [Size(str(path), len(path.read_text("utf-8").splitlines())) for path in paths]


def function_sizes(folder: Path) -> list[Size]:
    sizes = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                sizes.append(Size(f"{path}:{node.lineno} {node.name}", num_lines))
    return sizes


def figures(sizes: list[Size]) -> str:
    lines = sorted(size.num_lines for size in sizes) or [0]
    p90 = lines[min(len(lines) - 1, len(lines) * 9 // 10)]
    return f"median {statistics.median(lines):.0f}, p90 {p90}, max {lines[-1]}"


def main() -> int:
    too_large: list[str] = []
    print(f"{'':18}{'files':>6}  {'lines of a file':32}{'lines of a function'}")
    for name in (*SOURCES, "tests"):
        folder = Path(name)
        files, functions = file_sizes(folder), function_sizes(folder)
        print(f"{name:18}{len(files):6}  {figures(files):32}{figures(functions)}")
        if name == "tests":
            continue
        for sizes, ceiling in ((files, MAX_FILE_LINES), (functions, MAX_FUNCTION_LINES)):
            too_large += [
                f"{size.where}: {size.num_lines} lines, the ceiling is {ceiling}"
                for size in sizes
                if size.num_lines > ceiling
            ]
    print("\n".join(too_large), end="\n" if too_large else "")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
