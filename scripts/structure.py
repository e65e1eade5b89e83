"""Prints how large files, functions and folders are, and fails above the limits.

    python scripts/structure.py
    python scripts/structure.py --single    also lists the files that a single module imports

Lines include docstrings and comments. Only the limit on folders applies to tests. The last lines
count files that a single module imports, and names that more than one file or class has.
"""

from __future__ import annotations

import ast
import functools
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("moe_serve", "experts", "routing_predictor", "kernels")
SOURCES = (*PRODUCT, "scripts", "benchmarks")
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 20
SOURCE_SUFFIXES = (".py", ".js", ".cpp", ".h")
# Families of one-file plug-ins: each file stands alone, and a registry lists them.
PLUGIN_FOLDERS = frozenset({"moe_serve/model/families"})


@dataclass(frozen=True, slots=True)
class Size:
    """The lines of a file or function, or the source files of a folder."""

    where: str
    count: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The functions of a file, the names that it imports, and its classes."""

    functions: tuple[Size, ...]
    imported: tuple[str, ...]
    classes: tuple[str, ...]


def file_sizes(folder: Path) -> list[Size]:
    paths = sorted(folder.rglob("*.py"))
    return [Size(str(path), len(path.read_text("utf-8").splitlines())) for path in paths]


def function_sizes(folder: Path) -> list[Size]:
    return [size for path in sorted(folder.rglob("*.py")) for size in contents_of(path).functions]


@functools.cache  # three figures read them, and a syntax tree is too large to keep
def contents_of(path: Path) -> Contents:
    tree = ast.parse(path.read_text("utf-8"), str(path))
    functions, imported = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            functions.append(Size(f"{path}:{node.lineno} {node.name}", num_lines))
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return Contents(tuple(functions), tuple(imported), tuple(classes))


def folder_sizes(folder: Path) -> list[Size]:
    """Counts the source files on each level, without `__init__.py`, which only describes the
    folder.
    """
    counts = Counter(
        path.parent.as_posix()
        for path in folder.rglob("*")
        if path.suffix in SOURCE_SUFFIXES and path.name != "__init__.py"
    )
    return [Size(name, count) for name, count in sorted(counts.items())]


def figures(sizes: list[Size]) -> str:
    counts = sorted(size.count for size in sizes) or [0]
    p90 = counts[min(len(counts) - 1, len(counts) * 9 // 10)]
    return f"median {statistics.median(counts):.0f}, p90 {p90}, max {counts[-1]}"


def above(sizes: list[Size], ceiling: int, unit: str) -> list[str]:
    return [
        f"{size.where}: {size.count} {unit}, the ceiling is {ceiling}"
        for size in sizes
        if size.count > ceiling
    ]


def single_importers() -> dict[Path, str]:
    """Finds the product's files that exactly one other module of the product imports."""
    modules = {dotted(path): path for path in product_files()}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for target in contents_of(path).imported:
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != name:
                importers[target].add(name)
    return {modules[name]: min(found) for name, found in importers.items() if len(found) == 1}


def num_repeated_names() -> tuple[int, int]:
    """Counts the file names and the class names that the product has more than once."""
    files: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    for path in product_files():
        files[path.name] += path.name not in ("__init__.py", "__main__.py")
        classes.update(contents_of(path).classes)
    return sum(n > 1 for n in files.values()), sum(n > 1 for n in classes.values())


def product_files() -> list[Path]:
    return sorted(path for name in PRODUCT for path in Path(name).rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    name = ".".join(parts[1:] if parts[0] == "kernels" else parts)
    return name.removesuffix(".__init__")


def main() -> int:
    too_large: list[str] = []
    print(f"{'':18}{'files':>6}  {'lines of a file':32}{'lines of a function':32}largest folder")
    for name in (*SOURCES, "tests"):
        folder = Path(name)
        files, functions, folders = file_sizes(folder), function_sizes(folder), folder_sizes(folder)
        largest = max(folders, key=lambda size: size.count)
        print(
            f"{name:18}{len(files):6}  {figures(files):32}{figures(functions):32}"
            f"{largest.count} {largest.where}"
        )
        rooms = [size for size in folders if size.where not in PLUGIN_FOLDERS]
        too_large += above(rooms, MAX_FOLDER_FILES, "source files")
        if name != "tests":
            too_large += above(files, MAX_FILE_LINES, "lines")
            too_large += above(functions, MAX_FUNCTION_LINES, "lines")
    num_files, num_classes = num_repeated_names()
    singles = single_importers()
    print(
        f"product: {len(product_files())} files, {len(singles)} with a single importer; "
        f"{num_files} file names and {num_classes} class names occur more than once"
    )
    if "--single" in sys.argv[1:]:
        sizes = {size.where: size.count for name in PRODUCT for size in file_sizes(Path(name))}
        for path, importer in sorted(singles.items(), key=lambda item: sizes[str(item[0])]):
            print(f"{sizes[str(path)]:4} {path}  <- {importer}")
    print("\n".join(too_large), end="\n" if too_large else "")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
