"""Devices that a fleet may use: their type, number and price, and what a model costs on them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moe_serve.errors import ConfigError, shortened
from moe_serve.planning.calibration_file import Calibration
from moe_serve.simulate.catalogue import find_device
from moe_serve.simulate.coordinated.coordinated_run import PageSpeed
from moe_serve.simulate.costs.device import HeldOutError, read_device
from moe_serve.simulate.costs.model_shape import ModelShape
from moe_serve.simulate.layout import MAX_DEVICES, Layout, ModelSize
from moe_serve.simulate.simulation import CostedModel, calibrated, on_device

_TERM = re.compile(r"(.+?):([1-9]\d*)(?:@([0-9]+(?:\.[0-9]+)?))?")


class LayoutCosts:
    """Costs each layout once. A copy in another process costs them again."""

    def __init__(self, costed: Callable[[Layout], CostedModel]) -> None:
        self._costed = costed
        self._models: dict[Layout, CostedModel] = {}

    def __call__(self, layout: Layout) -> CostedModel:
        model = self._models.get(layout)
        if model is None:
            model = self._models[layout] = self._costed(layout)
        return model

    def __reduce__(self) -> tuple[type[LayoutCosts], tuple[Callable[[Layout], CostedModel]]]:
        return LayoutCosts, (self._costed,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Devices of one type. `price`: of one device and hour; `costed` raises ConfigError for a
    layout that has no costs (those of a calibration have none for experts spread over attention
    devices); `page_speed`: of KV pages between cells, among so many devices;
    `held_out`: how far the costs were off where they were checked."""

    name: str
    num_devices: int
    price: float
    node_devices: int
    memory_bytes: int | None
    size: ModelSize
    calibrated_shards: tuple[int, ...] | None  # numbers of shards that have costs; None: all have
    held_out: HeldOutError | None
    costed: Callable[[Layout], CostedModel]
    page_speed: Callable[[int], PageSpeed]


def read_fleet(text: str, model: ModelShape, routing: Path | None) -> tuple[Offer, ...]:
    """Parses "h100:64@2.50,h20:32@0.90": type, number, and price of a device and hour (1 if left
    out). Raises ConfigError."""
    offers: list[Offer] = []
    for term in text.replace(" ", "").split(","):
        found = _TERM.fullmatch(term)
        if found is None:
            raise ConfigError(
                f"fleet cannot be {shortened(text)!r}: it takes types of devices, such as "
                "h100:64@2.50,h20:32@0.90 (64 H100 at 2.50 an hour, 32 H20 at 0.90)."
            )
        device, count = read_device(find_device(found[1])), int(found[2])
        if count > MAX_DEVICES:
            raise ConfigError(f"devices must be in [1, {MAX_DEVICES}], got {count}.")
        if any(each.name == device.name for each in offers):
            raise ConfigError(f"fleet names {device.name} twice: give each type once.")

        offers.append(
            Offer(
                name=device.name,
                num_devices=count,
                price=float(found[3] or 1.0),
                node_devices=device.node_devices,
                memory_bytes=device.memory_bytes,
                size=model.size,
                calibrated_shards=None,
                held_out=device.held_out,
                costed=LayoutCosts(partial(on_device, model, device, routing=routing)),
                page_speed=partial(PageSpeed.of_device, device),
            )
        )
    return tuple(offers)


def calibrated_offer(
    calibration: Calibration, num_devices: int, memory_bytes: int | None, price: float = 1.0
) -> Offer:
    """Offers devices like the calibrated one. Raises ConfigError as `calibrated` does."""
    if not 1 <= num_devices <= MAX_DEVICES:
        raise ConfigError(f"devices must be in [1, {MAX_DEVICES}], got {num_devices}.")
    alone = calibrated(calibration, Layout.parse("colocated", 1))
    return Offer(
        name=alone.device_name,
        num_devices=num_devices,
        price=price,
        node_devices=num_devices,
        memory_bytes=memory_bytes,
        size=alone.size,
        calibrated_shards=calibration.costs.shard_counts,
        held_out=None,
        costed=LayoutCosts(partial(calibrated, calibration, shares_machine=False, has_http=True)),
        page_speed=partial(_page_speed, calibration),
    )


def _page_speed(calibration: Calibration, num_devices: int) -> PageSpeed:
    return PageSpeed.calibrated(calibration)
