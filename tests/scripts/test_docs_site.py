"""The documentation builds without a warning and covers the whole program."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs_site import api_reference, cli_reference
from docs_site.stage import without_folder_links

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.name
)
def test_a_drawing_has_a_title_and_a_description(path: Path) -> None:
    drawing = ElementTree.parse(path).getroot()
    for tag in ("title", "desc"):
        assert drawing.findtext(f"{{http://www.w3.org/2000/svg}}{tag}"), f"{path.name} has no {tag}"


def test_every_command_and_option_is_explained() -> None:
    page = cli_reference.render()
    for command in ("serve", "launch", "chat", "bench", "doctor", "place compare", "trace record"):
        assert re.search(rf"^#+ moe-serve {command}$", page, re.MULTILINE), command
    rows = [line for line in page.splitlines() if line.startswith("| `-")]
    assert len(rows) > 100
    assert [row for row in rows if row.endswith("|  |")] == [], "options without a help text"


def test_no_page_is_in_the_menu_twice() -> None:
    menu = (ROOT / "scripts/docs_site/mkdocs.yml").read_text("utf-8")
    pages = re.findall(r"[\w/-]+\.md$", menu, re.MULTILINE)
    assert len(pages) == len(set(pages)), pages


def test_no_sentence_stands_twice_on_a_page() -> None:
    """A wrong merge leaves doubled sentences."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        lines = [line for line in page.read_text("utf-8").splitlines() if len(line) > 60]
        prose = [line for line in lines if line[0] not in " |"]
        assert [line for line in prose if prose.count(line) > 1] == [], page.name


def test_the_tests_that_pages_name_exist() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = {path.name for path in files}
    for path in files:
        found |= set(re.findall(r"^def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        named = set(re.findall(r"`(test_[a-z0-9_]+(?:\.py)?)`", page.read_text("utf-8")))
        assert named <= found, f"{page.name} names tests that are not there: {named - found}"


def test_every_route_is_listed() -> None:
    page, spec = api_reference.render(), api_reference.openapi()
    for path, methods in spec["paths"].items():
        for method in methods:
            assert f"## {method.upper()} {path}\n" in page
    assert {"/admin/hang", "/admin/trace/start", "/dashboard/state"} <= spec["paths"].keys()
    assert "| `messages` | array (1 to 4096) of" in page
    assert json.dumps(spec).count("9.223372036854776e+18") and "9.22" not in page


def test_links_to_folders_become_words() -> None:
    text = "see [the files](../configs/models), [all keys](../configs/serve.yaml#x), [a](b.md)"
    assert without_folder_links(text, "docs/page.md") == (
        "see the files, [all keys](../configs/serve.yaml#x), [a](b.md)"
    )


@pytest.mark.timeout(400)
def test_the_site_builds_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is built in this process, which has imported the server."""
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed (extra: docs)")
    program = importlib.import_module("docs_site.__main__")
    monkeypatch.setattr("sys.argv", ["docs_site", "--out", str(tmp_path / "site")])
    code = program.main()
    assert code == 0, "".join(capsys.readouterr())
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "docs/guide/concepts.html", "docs/reference/cli.html"} <= pages
    home = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?://", home), "offline"
