"""The formats of stored weights, keyed by the `quant_method` of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.formats.awq import awq_from
from moe_serve.model.formats.compressed_tensors import compressed_tensors_from
from moe_serve.model.formats.fp8 import fp8_from
from moe_serve.model.formats.gptq import gptq_from
from moe_serve.model.formats.mxfp4 import mxfp4_from
from moe_serve.model.formats.weight_format import WeightFormat

FORMATS: Mapping[str, Callable[[HFConfig], WeightFormat]] = {
    "awq": awq_from,
    "compressed-tensors": compressed_tensors_from,
    "fp8": fp8_from,
    "gptq": gptq_from,
    "mxfp4": mxfp4_from,
}


def format_of(config: HFConfig) -> WeightFormat | None:
    """Returns the format that the config names, None for plain floats; CheckpointError if not
    supported.
    """
    quantization = config.quantization()
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise quantization.error(
            "quant_method",
            f"is {method!r}, which is not served; served: {', '.join(FORMATS)}, and plain floats",
        )
    return FORMATS[method](quantization)


__all__ = ["FORMATS", "WeightFormat", "format_of"]
