"""Builds the documentation as a site; a broken link or a page missing from the menu is an error.

    PYTHONPATH=.:kernels:scripts python -m docs_site             into build/site
    PYTHONPATH=.:kernels:scripts python -m docs_site --out DIR

Needs the `docs` extra; `make docs` runs it. The pages load nothing from other sites.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from docs_site.stage import ROOT, stage


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation as a site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory(prefix="moe-serve-docs-") as folder:
        stage(Path(folder))
        config = load_config(
            str(Path(__file__).with_name("mkdocs.yml")),
            docs_dir=folder,
            site_dir=str(out),
            strict=True,
        )
        try:
            build(config)
        except Abort as error:
            print(error, file=sys.stderr)
            return 1
    print(f"the site is in {out}: open {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
