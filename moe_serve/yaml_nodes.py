"""The nodes of a YAML file, each once. A node that aliases name lies in several places.

What reads a file as a tree (a check, a message that shows a value) visits an aliased node as often
as it is named, and aliases of aliases double that with each line.
"""

from __future__ import annotations

import yaml

from moe_serve.errors import ConfigError

MOST_COPIES = 100_000  # nodes that aliases add to those that are written
MOST_LEVELS = 100


def distinct_nodes(root: yaml.Node | None, source: str) -> list[yaml.Node]:
    """In the order of the file. Raises ConfigError where aliases stand for too much, or for what
    they are in, and where lists and mappings lie too deep in each other."""
    walk = _Walk(source)
    if root is None:
        return walk.nodes
    num_nodes, _ = walk.measure(root)
    num_copies = num_nodes - len(walk.nodes)
    if num_copies > MOST_COPIES:
        raise ConfigError(
            f"the aliases of {source} repeat {num_copies:,} values, and {MOST_COPIES:,} is the "
            "most: write out what is meant."
        )
    return walk.nodes


class _Walk:
    """Sizes of nodes with all that lies in them, counted once each."""

    def __init__(self, source: str) -> None:
        self.nodes: list[yaml.Node] = []
        self._source = source
        self._measured: dict[int, tuple[int, int] | None] = {}  # by id; None: we are in it

    def measure(self, node: yaml.Node) -> tuple[int, int]:
        """(nodes, levels), as if every alias was written out."""
        place = f"{self._source}:{node.start_mark.line + 1}"
        if id(node) in self._measured:
            known = self._measured[id(node)]
            if known is None:
                raise ConfigError(f"an alias stands for a value that it is in itself ({place}).")
            return known
        self._measured[id(node)] = None
        self.nodes.append(node)
        inner = [self.measure(part) for part in _parts(node)]
        num_nodes = 1 + sum(nodes for nodes, _ in inner)
        num_levels = 1 + max((levels for _, levels in inner), default=0)
        if num_levels > MOST_LEVELS:
            raise ConfigError(f"values lie more than {MOST_LEVELS} deep in each other ({place}).")
        self._measured[id(node)] = num_nodes, num_levels
        return num_nodes, num_levels


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
