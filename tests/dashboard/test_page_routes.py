"""The files of the pages: a closed set, public, under a policy that allows no other source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.http.dashboard import board
from moe_serve.http.gate.auth import ApiKeyMiddleware, KeyRing
from moe_serve.http.pages.page_files import FOLDER, PAGE_FILES, add_page_routes

PAGES = ("/dashboard", "/dashboard/playground")
FILES = sorted(path for path in FOLDER.rglob("*.*") if path.suffix not in (".py", ".pyc"))


@pytest.fixture
def client() -> TestClient:
    app = FastAPI(redirect_slashes=False)
    add_page_routes(app)
    keys = KeyRing(("secret",))
    app.add_middleware(ApiKeyMiddleware, keys=keys, admin_keys=KeyRing(()))
    return TestClient(app)


def test_every_file_is_served_without_a_key(client: TestClient) -> None:
    assert set(PAGES) < PAGE_FILES.keys()
    assert len(PAGE_FILES) == len(FILES), "a file in pages/ is of a kind that is not served"
    for path in PAGE_FILES:
        answer = client.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        known = {"if-none-match": f'"other", W/{answer.headers["etag"]}'}
        again = client.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b""), path
        assert client.head(path).headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/",
        "/dashboard/state",
        "/dashboard/assets",
        "/dashboard/assets/",
        "/dashboard/assets/dashboard.html",
        "/dashboard/assets/page_files.py",
        "/dashboard/assets/element.js",
        "/dashboard/assets/../page_files.py",
        "/dashboard/assets/..%2fpage_files.py",
        "/dashboard/assets/%2e%2e%2fapp.py",
        "/dashboard/assets//etc/passwd",
        "/dashboard/assets/base.css%00.js",
        "/dashboard/assets/BASE.CSS",
        "/dashboard\\assets\\base.css",
        "/dashboard/playground/assets/base.css",
    ],
)
def test_nothing_else_is(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer secret"}).status_code == 404


def test_pages_name_only_files_of_the_set() -> None:
    """Pages name no other host, and no file that is not served."""
    for path in FILES:
        words = path.read_text("utf-8")
        for host in re.findall(r"https?://[^\"'\s]+", words):
            assert host == "http://www.w3.org/2000/svg", f"{path.name}: {host}"
        assets = [FOLDER / name for name in re.findall(r"assets/([\w./]+)", words)]
        assets += [path.parent / name for name in re.findall(r'from "(\.[\w./]+\.js)"', words)]
        assert {asset.resolve() for asset in assets} <= set(FILES), path.name


def test_no_text_becomes_markup_and_files_are_small() -> None:
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(")
    for path in sorted(FOLDER.rglob("*.js")):
        words = path.read_text("utf-8")
        assert not forbidden.search(words), path.name
        assert len(words.splitlines()) <= 350, path.name


def test_every_kind_of_event_has_its_colour() -> None:
    folder = Path(board.__file__).parent
    source = "".join((folder / f"{name}.py").read_text() for name in ("board", "snapshot"))
    tones = (
        (FOLDER / "panels/events_panel.js").read_text().partition("TONES = {")[2].partition("}")[0]
    )
    coloured = set(re.findall(r"(\w+):", tones))
    assert set(re.findall(r'\.add\(\s*"(\w+)"', source)) <= coloured
    assert all(f'"{kind}"' in source for kind in coloured)


def test_wheels_take_the_files() -> None:
    """hatchling packs every file of a package that .gitignore does not name."""
    root = Path(__file__).parents[2]
    ignored = (root / ".gitignore").read_text("utf-8").split()
    assert not [path.name for path in FILES if f"*{path.suffix}" in ignored]
