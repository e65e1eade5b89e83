"""The connection from node 0 to the agent of another node."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.launch.node_agent import AgentMessage
from moe_serve.cluster.launch.node_ranks import (
    SILENCE_S,
    AgentOrder,
    NodeHello,
    NodeLeaves,
    RankEnded,
)
from moe_serve.errors import ChannelClosedError


class RemoteNode:
    """Node 0's end of one agent's connection, read on a thread of its own. The callbacks run on
    that thread; `on_gone` is called once, with the reason."""

    def __init__(
        self,
        hello: NodeHello,
        channel: Channel[AgentMessage],
        *,
        on_ended: Callable[[RankEnded], None],
        on_leaves: Callable[[RemoteNode], None],
        on_gone: Callable[[RemoteNode, str], None],
    ) -> None:
        self.hello, self.number = hello, hello.node_rank
        self._channel, self._on_ended, self._on_gone = channel, on_ended, on_gone
        self._on_leaves = on_leaves

    @property
    def name(self) -> str:
        """The name of a joined node, or the number of one of the first nodes."""
        return self.hello.joins or str(self.number)

    def watch(self) -> None:
        """Begins to read; until then the agent's reports are not handled."""
        threading.Thread(target=self._read, name=f"node-{self.name}", daemon=True).start()

    def send(self, order: AgentOrder) -> None:
        """Sends an order. If the agent is gone, `on_gone` reports that."""
        try:
            self._channel.send(order)
        except ChannelClosedError:
            self._channel.close()

    def close(self) -> None:
        self._channel.close()

    def _read(self) -> None:
        try:
            # Twice half the time: if this host itself was suspended, the second wait finds the
            # messages that arrived meanwhile.
            while True:
                report = self._channel.receive(SILENCE_S / 2)
                if report is None and (report := self._channel.receive(SILENCE_S / 2)) is None:
                    self._on_gone(self, f"silent for {SILENCE_S:g} s")
                    return
                if isinstance(report, RankEnded):
                    self._on_ended(report)
                elif isinstance(report, NodeLeaves):
                    self._on_leaves(self)
        except ChannelClosedError as error:
            self._on_gone(self, str(error))
        finally:
            self._channel.close()
