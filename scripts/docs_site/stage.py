"""Collects the sources of the documentation site: the repository's Markdown and generated pages.

The folders are those of the repository, so that links between pages work on the site and in the
tree. Linked files that are not Markdown are copied too; links to folders become plain words.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path

from docs_site import api_reference, cli_reference

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
GENERATED = {
    "docs/reference/api.md": api_reference.render,
    "docs/reference/cli.md": cli_reference.render,
}
_LINK = re.compile(r"\[(?P<words>[^\[\]]*)\]\((?P<target>[^)#\s]+)(?:#[^)\s]*)?\)")


def stage(folder: Path) -> None:
    """Fills an empty folder with the pages and files of the site."""
    shutil.copytree(ROOT / "docs", folder / "docs", dirs_exist_ok=True)
    for name in OTHERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name, render in GENERATED.items():
        (folder / name).write_text(render(), "utf-8")
    for page in sorted(folder.rglob("*.md")):
        name = page.relative_to(folder).as_posix()
        text = page.read_text("utf-8")
        for target in linked(text, name):
            if (ROOT / target).is_file() and not (folder / target).exists():
                (folder / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / target, folder / target)
        page.write_text(without_folder_links(text, name), "utf-8")


def linked(text: str, page: str) -> list[str]:
    """Returns the paths in the repository that a page links to."""
    paths = [_path(match["target"], page) for match in _LINK.finditer(text)]
    return [path for path in paths if path is not None]


def without_folder_links(text: str, page: str) -> str:
    """Replaces links to folders, which have no page on the site, by their words."""

    def replace(match: re.Match[str]) -> str:
        path = _path(match["target"], page)
        return match["words"] if path is not None and (ROOT / path).is_dir() else match[0]

    return _LINK.sub(replace, text)


def _path(target: str, page: str) -> str | None:
    """Returns the path in the repository, or None for a link to another site."""
    if ":" in target or target.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
