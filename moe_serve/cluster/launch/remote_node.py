"""Node 0's end of one agent's connection."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.launch.agent_messages import SILENCE_S, AgentOrder, NodeHello, RankEnded
from moe_serve.cluster.launch.node_agent import AgentMessage
from moe_serve.errors import ChannelClosedError


class RemoteNode:
    """Reads on a thread of its own. `on_gone` is called once, on that thread, with the reason."""

    def __init__(
        self,
        hello: NodeHello,
        channel: Channel[AgentMessage],
        on_ended: Callable[[RankEnded], None],
        on_gone: Callable[[RemoteNode, str], None],
    ) -> None:
        self.hello = hello
        self._channel, self._on_ended, self._on_gone = channel, on_ended, on_gone
        self._thread = threading.Thread(
            target=self._read, name=f"node-{hello.node_rank}", daemon=True
        )

    def watch(self) -> None:
        """Begin to read; until then nobody hears of what the agent says."""
        self._thread.start()

    def send(self, order: AgentOrder) -> None:
        """An agent that is gone hears nothing; `on_gone` tells so."""
        try:
            self._channel.send(order)
        except ChannelClosedError:
            self._channel.close()

    def close(self) -> None:
        self._channel.close()

    def _read(self) -> None:
        try:
            # Twice half the time: when this host itself stood still, the second look finds what
            # arrived meanwhile.
            while True:
                report = self._channel.receive(SILENCE_S / 2)
                if report is None and (report := self._channel.receive(SILENCE_S / 2)) is None:
                    self._on_gone(self, f"silent for {SILENCE_S:g} s")
                    return
                if isinstance(report, RankEnded):
                    self._on_ended(report)
        except ChannelClosedError as error:
            self._on_gone(self, str(error))
        finally:
            self._channel.close()
