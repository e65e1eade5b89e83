"""A device as its maker publishes it, from a YAML file, with the shares of it that are reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from moe_serve.config.yaml_nodes import plain_value, read_yaml
from moe_serve.errors import ConfigError, shortened
from moe_serve.regular_file import regular_file

_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The figures of a hardware class that must be fitted: shares of the published peaks, and the
    fixed times. The defaults are documented in docs/internals/simulation.md."""

    gemm: float = 0.6  # of the peak FLOP/s, in matrix products
    attention: float = 0.4  # the same, in attention
    memory: float = 0.8  # of the memory's bandwidth
    link: float = 0.5  # of a link's bandwidth, in dispatch and combine
    launch_us: float = 3.0  # of one operation
    host_ms: float = 1.0  # of a step: scheduling, inputs, sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutError:
    """The errors of predictions on published figures of hardware classes that the efficiencies
    were not fitted to: relative errors, and the number of figures."""

    median: float
    worst: float
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One device. Links are one way; those of a node join up to `node_devices` devices."""

    name: str
    hardware_class: str
    bf16_tflops: float
    memory_tb_s: float
    memory_gb: float
    node_devices: int
    node_link_gb_s: float
    network_gb_s: float  # of one device, to other nodes
    fp8_tflops: float | None = None
    link_latency_us: float = 10.0
    has_graphs: bool = True  # decode steps run as CUDA graphs, with the captured numbers of rows
    efficiency: Efficiency = Efficiency()
    held_out: HeldOutError | None = None

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * _GIGA)

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_tb_s * _TERA * self.efficiency.memory

    def flops_per_s(self, is_fp8: bool) -> float:
        """Returns the peak of matrix products. A device without fp8 units multiplies in bf16."""
        tera = self.fp8_tflops if is_fp8 and self.fp8_tflops is not None else self.bf16_tflops
        return tera * _TERA

    def link_bytes_per_s(self, is_in_node: bool) -> float:
        giga = self.node_link_gb_s if is_in_node else self.network_gb_s
        return giga * _GIGA * self.efficiency.link


def read_device(path: Path) -> DeviceType:
    """Reads and checks a file. Raises ConfigError."""
    try:
        root = read_yaml(regular_file(path).read_text(encoding="utf-8"), str(path))
        device = msgspec.convert(plain_value(root), DeviceType, strict=True)
    except OSError as error:
        raise ConfigError(f"cannot read the device {path}: {error.strerror or error}.") from None
    except (ValueError, yaml.YAMLError, msgspec.ValidationError) as error:
        why = shortened(" ".join(str(error).split()))
        raise ConfigError(f"{path} does not describe a device: {why}.") from None
    _check(device, path)
    return device


def _check(device: DeviceType, path: Path) -> None:
    own = device.efficiency
    positive = {
        name: getattr(device, name)
        for name in ("bf16_tflops", "memory_tb_s", "memory_gb", "node_link_gb_s", "network_gb_s")
    } | {"node_devices": device.node_devices, "fp8_tflops": device.fp8_tflops or 1.0}
    for name, value in positive.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{path}: {name} must be greater than 0 and finite, got {value:g}.")
    for name in ("gemm", "attention", "memory", "link"):
        if not 0 < getattr(own, name) <= 1:
            raise ConfigError(
                f"{path}: efficiency.{name} must be in (0, 1], got {getattr(own, name):g}."
            )
    for name, value in (
        ("link_latency_us", device.link_latency_us),
        ("efficiency.launch_us", own.launch_us),
        ("efficiency.host_ms", own.host_ms),
    ):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{path}: {name} must be 0 or more and finite, got {value:g}.")
