"""The adapters of a rank: reads its part of each when told to, and drops them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from experts.virtual_experts import AdapterExperts, MissingAdapterError, VirtualExperts
from moe_serve.adapters.adapter_build import AdapterBuilder
from moe_serve.adapters.adapter_files import open_unchanged
from moe_serve.adapters.adapter_part import AdapterPart, LiveModel
from moe_serve.cluster.control.adapter_messages import AdapterLoaded, DropAdapter, LoadAdapter
from moe_serve.cluster.ranks.mirror import adapter_key
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.errors import ChannelClosedError, MoeServeError
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.adapter_rows import AdapterWeights
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.gather import Gather
from moe_serve.model.stage.tensor_shard import TensorShard

_log = logging.getLogger(__name__)

Tell = Callable[[AdapterLoaded], None]  # sends a report, on any thread


class RankAdapters:
    """Implements LoadedAdapters. One thread reads and drops adapters beside the steps, in the
    sequence of the orders.

    `experts` says where an expert rank puts the experts that it holds.
    """

    def __init__(
        self,
        loader: ModelLoader,
        config: AdapterConfig,
        orders: Sequence[LoadAdapter],
        part: AdapterPart,
        live: LiveModel,
        tell: Tell,
        experts: VirtualExperts | None = None,
    ) -> None:
        """`orders` are the adapters that the coordinator already has; they are loaded here. `live`
        is this rank's part of the base model.
        """
        self._loader, self._tell, self._experts = loader, tell, experts
        self._config, self._live = config, live
        self._builder = AdapterBuilder(loader, config, part, live)
        self._orders: dict[int, LoadAdapter] = {}
        self._loaded: dict[bytes, AdapterWeights] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        for order in orders:
            self._load(order)
        self._builder.rests.begin()

    def close(self) -> None:
        """Ends the reads. One that hangs does not hold up the rank's end."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def weights(self, digest: bytes) -> AdapterWeights:
        """See LoadedAdapters. `digest` is the adapter's key in this rank's plans.

        Shards other than the first may have to wait until they have read it.
        """
        if digest not in self._loaded:
            self._reader.submit(lambda: None).result()
        found = self._loaded.get(digest)
        if found is None:
            raise MissingAdapterError(
                "the adapter is no longer loaded on this rank, because its files have changed"
            )
        return found

    def handle(self, order: LoadAdapter | DropAdapter) -> None:
        """Handles an order. The answer is sent when it is done."""
        work = self._load if isinstance(order, LoadAdapter) else self._drop
        done = self._reader.submit(work, order)  # type: ignore[arg-type]
        if isinstance(order, LoadAdapter) and order.is_due:
            done.result()

    def hold(self, part: AdapterPart) -> None:
        """Reads all adapters again, for other experts, and waits for the end."""
        self._reader.submit(self._hold, part).result()

    def _hold(self, part: AdapterPart) -> None:
        self._builder = AdapterBuilder(self._loader, self._config, part, self._live)
        for order in list(self._orders.values()):
            self._load(order)
        self._builder.rests.begin()

    def _load(self, order: LoadAdapter) -> None:
        """Reads an adapter and reports on it. Any error ends this load only."""
        try:
            built = self._built(order)
        except Exception as error:
            if not isinstance(error, MoeServeError | OSError):
                _log.exception("loading the adapter in %s failed", order.folder)
            self._drop(DropAdapter(number=order.number))
            report = AdapterLoaded(number=order.number, why=str(error) or repr(error))
        else:
            self._keep(order, built)
            report = AdapterLoaded(
                number=order.number, kind=built.kind, rank=built.rank, num_bytes=built.num_bytes
            )
        with suppress(ChannelClosedError):
            self._tell(report)

    def _built(self, order: LoadAdapter) -> AdapterWeights:
        with open_unchanged(Path(order.folder), order.digest) as files:
            built = self._builder.build(files)
        return replace(built, number=order.number)

    def _keep(self, order: LoadAdapter, built: AdapterWeights) -> None:
        self._orders[order.number] = order
        self._loaded[adapter_key(order.number)] = built
        if self._experts is not None:
            self._experts.put(order.number, _experts_of(built))

    def _drop(self, order: DropAdapter) -> None:
        self._orders.pop(order.number, None)
        self._loaded.pop(adapter_key(order.number), None)
        if self._experts is not None:
            self._experts.drop(order.number)


def _experts_of(built: AdapterWeights) -> Mapping[int, AdapterExperts]:
    layers = enumerate(built.layers)
    return {layer: each.experts for layer, each in layers if each.experts is not None}


def attention_adapters(
    loader: ModelLoader,
    config: AdapterConfig,
    orders: Sequence[LoadAdapter],
    stage: AttentionStage,
    gather: Gather | None,
    tell: Tell,
) -> RankAdapters | None:
    """Returns the adapters of a process that has attention, or a shard of it; None: the server has
    none."""
    if not config.is_enabled:
        return None
    shard = TensorShard(0, 1) if gather is None else gather.shard
    live = LiveModel(attention=stage, gather=gather)
    return RankAdapters(loader, config, orders, AdapterPart(shard=shard, experts={}), live, tell)
