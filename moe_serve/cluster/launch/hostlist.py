"""Expands Slurm's host lists: `node[01-03,7],login` is node01 node02 node03 node7 login.

It is done here because `scontrol show hostnames` is missing in some containers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_serve.errors import ConfigError

MAX_HOSTS = 65536
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Returns every host in order; raises ConfigError.

    Numbers keep the width of the first: [08-10] is 08 09 10, and [8-10] is 8 9 10. Several brackets
    in one name are multiplied, the last one running fastest: r[1-2]n[1-2] is r1n1 r1n2 r2n1 r2n2.
    """
    hosts: list[str] = []
    for name in _names(text):
        hosts += _expand(name, text)
        if len(hosts) > MAX_HOSTS:
            raise _wrong(text, f"it names more than {MAX_HOSTS} hosts")
    if not hosts:
        raise _wrong(text, "it is empty")
    return tuple(hosts)


def _names(text: str) -> Iterator[str]:
    """Splits the list at the commas outside brackets."""
    depth = start = 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _wrong(text, f"a bracket at position {index} does not match")
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise _wrong(text, "a bracket is not closed")
    if text:
        yield text[start:]


def _expand(name: str, text: str) -> list[str]:
    hosts = [""]
    name = name.strip()
    if not name or any(character.isspace() for character in name):
        raise _wrong(text, "a host name is empty or has spaces")
    for match in _PIECE.finditer(name):
        endings = [match[2]] if match[1] is None else _numbers(match[1], text)
        if len(hosts) * len(endings) > MAX_HOSTS:
            raise _wrong(text, f"it names more than {MAX_HOSTS} hosts")
        hosts = [host + ending for host in hosts for ending in endings]
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = _NUMBERS.fullmatch(part.strip())
        if match is None:
            raise _wrong(text, f"[{ranges}] is not a list of numbers and ranges")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MAX_HOSTS:
            raise _wrong(text, f"the range {part} runs backwards or is too long")
        width = len(first)
        found += [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    return found


def _wrong(text: str, reason: str) -> ConfigError:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return ConfigError(f"the host list {shown!r} cannot be read: {reason}.")
