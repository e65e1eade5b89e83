"""Reads YAML files by YAML 1.2's plain rules, and visits each node of a file once.

PyYAML follows YAML 1.1, which reads `1:30` as 90, `017` as 15, `on` as true and `2026-01-02` as a
date. Here a number has decimal digits (or `0x` and hexadecimal ones), true and false are the only
booleans, and everything else is text as written, so a key that takes a number refuses it.

A node named by aliases occurs in several places. Code that reads a file as a tree (a check, or a
message that shows a value) visits it once per alias, and aliases of aliases double that with each
line, so their number is limited.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from moe_serve.errors import ConfigError, shortened

MOST_COPIES = 100_000  # nodes that aliases may add to the written ones
MOST_LEVELS = 100
_TAG = "tag:yaml.org,2002:"
_TEXT = f"{_TAG}str"
# Values by the YAML 1.2 core schema, without `0o17`, which few people mean as 15. `8_000` is meant
# as a number; a number of 20 or more digits is text, as no key takes one.
_PLAIN: Mapping[str, tuple[str, str]] = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (
        r"[-+]?(0|[1-9][0-9]{0,18}|[1-9][0-9]{0,2}(_[0-9]{3}){1,5})|0x[0-9a-fA-F]{1,15}",
        "-+0123456789",
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Returns the resolvers as PyYAML keeps them, by the first character of a value."""
    by_character: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, (pattern, characters) in _PLAIN.items():
        entry = (_TAG + name, re.compile(rf"(?:{pattern})\Z"))
        for character in (*characters, *([""] if name == "null" else [])):
            by_character.setdefault(character, []).append(entry)
    return by_character


def _construct_int(_loader: Any, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 16 if text.startswith("0x") else 10)


def _construct_float(_loader: Any, node: yaml.ScalarNode) -> float:
    word = node.value.lower().replace(".inf", "inf").replace(".nan", "nan")
    value = float(word)
    if math.isinf(value) and word.lstrip("+-") != "inf":
        raise yaml.MarkedYAMLError(
            problem=f"{shortened(node.value)} is too large for a number",
            problem_mark=node.start_mark,
        )
    return value


def _plain(base: type) -> Any:
    """Returns a loader class with the rules of this module."""
    loader: Any = type("PlainLoader", (base,), {"yaml_implicit_resolvers": _resolvers()})
    loader.add_constructor(f"{_TAG}int", _construct_int)
    loader.add_constructor(f"{_TAG}float", _construct_float)
    return loader


class _QuotingDumper(yaml.SafeDumper):
    """Puts quotes around text that YAML 1.1 or this module would read as another type."""


for _first, _entries in _resolvers().items():
    for _tag, _pattern in _entries:
        _QuotingDumper.add_implicit_resolver(_tag, _pattern, [_first])
_LOADER = _plain(yaml.SafeLoader)
_COMPILED_LOADER = _plain(getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_yaml(text: str, source: str, *, is_large: bool = False) -> yaml.Node | None:
    """Returns the root of a file of one document, checked: no duplicate keys, no tags, limited
    aliases.

    `is_large` uses the compiled parser if available. Raises ConfigError with file and line, and
    PyYAML's errors for text that is not YAML.
    """
    loader = (_COMPILED_LOADER if is_large else _LOADER)(text)
    try:
        root: yaml.Node | None = loader.get_single_node()
        for node in distinct_nodes(root, source):
            _refuse_tag(loader, node, source)
            _refuse_doubled_keys(node, root, source)
    finally:
        loader.dispose()
    return root


def plain_value(node: yaml.Node | None) -> Any:
    """Returns the value of a node of `read_yaml`: text, numbers, lists, mappings. Raises
    YAMLError."""
    return None if node is None else _LOADER("").construct_document(node)


def yaml_line(value: object) -> str:
    """Returns a plain value on one line, which `read_yaml` and other YAML readers read back
    unchanged."""
    text: str = yaml.dump(
        value, Dumper=_QuotingDumper, default_flow_style=True, width=10_000, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def value_place(root: yaml.Node | None, message: str, source: str) -> str:
    """Returns place and text of the value that a msgspec message ("... - at `$.nodes[0].slots`") is
    about: " (cluster.yaml:3: '1:30')"."""
    found = re.search(r"at `\$([^`]*)`", message)
    node = root
    for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", found[1]) if found else ():
        inner = _inner_node(node, name, index)
        if inner is None:
            break
        node = inner
    if node is None:
        return ""
    written = f": {shortened(repr(node.value))}" if isinstance(node, yaml.ScalarNode) else ""
    return f" ({source}:{node.start_mark.line + 1}{written})"


def _inner_node(node: yaml.Node | None, name: str, index: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode) and name:
        return next((value for key, value in node.value if key.value == name), None)
    if isinstance(node, yaml.SequenceNode) and index and int(index) < len(node.value):
        item: yaml.Node = node.value[int(index)]
        return item
    return None


def _refuse_tag(loader: Any, node: yaml.Node, source: str) -> None:
    """Refuses tags except `!!str`, which means the same as quotes."""
    is_scalar = isinstance(node, yaml.ScalarNode)
    is_bare = isinstance(node, yaml.ScalarNode) and not node.style  # without quotes
    implied = loader.resolve(type(node), node.value, (is_bare, not is_bare))
    if node.tag != implied and not (is_scalar and node.tag == _TEXT):
        name = shortened(node.tag.replace(_TAG, "!!"))
        raise ConfigError(
            f"this is not a plain value ({source}:{node.start_mark.line + 1}): it has the tag "
            f"{name}; remove the tag."
        )


def _refuse_doubled_keys(node: yaml.Node, root: yaml.Node | None, source: str) -> None:
    seen: set[str] = set()
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        place = f"{source}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"a key must be one word, not a list or a mapping ({place}).")
        if key.value in seen:
            path = ".".join((*(_path_to(node, root) or ()), key.value))
            raise ConfigError(f"{shortened(path)} is set twice ({place}): leave one of them out.")
        seen.add(key.value)


def _path_to(node: yaml.Node, start: yaml.Node | None) -> tuple[str, ...] | None:
    """Returns the keys that lead from `start` to a node, the outermost first; None if none do."""
    if node is start:
        return ()
    pairs = start.value if isinstance(start, yaml.MappingNode) else ()
    items = start.value if isinstance(start, yaml.SequenceNode) else ()
    named = [(str(key.value), part) for key, part in pairs]
    for name, part in (*named, *((str(index), item) for index, item in enumerate(items))):
        rest = _path_to(node, part)
        if rest is not None:
            return (name, *rest)
    return None


def distinct_nodes(root: yaml.Node | None, source: str) -> list[yaml.Node]:
    """Returns the nodes in the order of the file. Raises ConfigError if aliases stand for too many
    values or for a value that contains them, or if values are nested too deeply."""
    walk = _NodeWalk(source)
    if root is None:
        return walk.nodes
    num_nodes, _ = walk.measure(root)
    num_copies = num_nodes - len(walk.nodes)
    if num_copies > MOST_COPIES:
        raise ConfigError(
            f"the aliases of {source} repeat {num_copies:,} values; at most "
            f"{MOST_COPIES:,} are allowed: use fewer aliases."
        )
    return walk.nodes


class _NodeWalk:
    """Measures nodes with everything inside them, each node once."""

    def __init__(self, source: str) -> None:
        self.nodes: list[yaml.Node] = []
        self._source = source
        self._measured: dict[int, tuple[int, int] | None] = {}  # by id; None: being measured

    def measure(self, node: yaml.Node) -> tuple[int, int]:
        """Returns (nodes, levels) as if every alias were written out."""
        place = f"{self._source}:{node.start_mark.line + 1}"
        if id(node) in self._measured:
            known = self._measured[id(node)]
            if known is None:
                raise ConfigError(f"an alias stands for a value that contains it ({place}).")
            return known
        self._measured[id(node)] = None
        self.nodes.append(node)
        inner = [self.measure(part) for part in _parts(node)]
        num_nodes = 1 + sum(nodes for nodes, _ in inner)
        num_levels = 1 + max((levels for _, levels in inner), default=0)
        if num_levels > MOST_LEVELS:
            raise ConfigError(f"values are nested more than {MOST_LEVELS} deep ({place}).")
        self._measured[id(node)] = num_nodes, num_levels
        return num_nodes, num_levels


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
