"""Writes the drawings of the documentation into docs/images.

PYTHONPATH=scripts python -m diagrams
"""

from __future__ import annotations

from diagrams.gallery import IMAGES, PICTURES


def main() -> None:
    for name, make in PICTURES.items():
        (IMAGES / name).write_text(make().render(), "utf-8")
        print(IMAGES / name)


if __name__ == "__main__":
    main()
