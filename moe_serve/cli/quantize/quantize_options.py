"""The options of `moe-serve quantize`, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_serve.cli.options import REQUIRED, argument, option
from moe_serve.errors import ConfigError

MXFP4 = "mxfp4"
SCHEMES = ("w4a16", "w8a16", MXFP4)
METHODS = ("rtn", "gptq")
GROUPS = (32, 64, 128)
_ATTENTION = ("w8", "w4", "keep")
_HEAD = ("keep", "w8", "w4")
_AUTO = "auto:"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """Options of `moe-serve quantize`."""

    model: str = argument(
        REQUIRED, help="Folder of a checkpoint in Hugging Face layout, with weights in floats."
    )
    out: Path = option(REQUIRED, help="Folder to write; it must not exist.")
    scheme: str = option(
        "w4a16",
        help="Storage of the routed experts: w4a16 (int4), w8a16 (int8), or mxfp4 for GPT-OSS. "
        "Activations stay in 16 bits.",
    )
    group: int = option(32, help="Number of inputs that share a scale: 32, 64 or 128.")
    method: str = option(
        "rtn",
        help=(
            "rtn rounds each weight to the nearest value; gptq keeps the error small on the "
            "inputs that come from --texts."
        ),
    )
    texts: list[Path] | None = option(
        None,
        help=(
            "Text files (.txt or .txt.xz), or folders of them, to calibrate and measure on; each "
            "folder or file is one domain. A part of the texts is held out for the measurement. "
            "May be given more than once."
        ),
    )
    held_out: list[Path] | None = option(
        None,
        help="Texts to measure on instead of a part of --texts. May be given more than once.",
    )
    tokens: int = option(131_072, min=1, help="Number of tokens of the texts to calibrate on.")
    held_out_tokens: int = option(
        16_384, min=64, help="Number of held-out tokens to measure the result on."
    )
    attention: str | None = option(
        None,
        show_default="w8; keep with mxfp4",
        help=(
            "Storage of attention, shared experts and dense MLPs: w8 (int8, one scale per row), "
            "w4 (int4 in groups) or keep (attention stays as it is, and the others are stored as "
            "--scheme says)."
        ),
    )
    head: str = option("keep", help="Storage of the output head: keep, w8 or w4.")
    int8_layers: str | None = option(
        None,
        help=(
            "auto:BUDGET, such as auto:0.02, stores the experts of the most sensitive layers in "
            "int8, so that the other layers change the model by at most BUDGET nats a token (KL "
            "divergence)."
        ),
    )
    keep: str | None = option(
        None,
        help=("Regular expression. Modules whose names it matches in any part are not quantised."),
    )
    pooling: bool = option(
        True,
        "--pooling/--no-pooling",
        help="Use the inputs of all tokens for the statistics of experts that few tokens chose "
        "(gptq).",
    )
    report: Path | None = option(None, help="JSON file for a second copy of the report in --out.")
    num_threads: int | None = option(
        None, min=1, help="Number of CPU threads. Default: the machine's cores."
    )
    seed: int = option(0, help="Seed for the choice of texts.")

    def check(self) -> None:
        """Raises ConfigError for values that are not allowed or contradict each other."""
        _check_one_of("--scheme", self.scheme, SCHEMES)
        _check_one_of("--method", self.method, METHODS)
        _check_one_of("--attention", self.attention or "keep", _ATTENTION)
        _check_one_of("--head", self.head, _HEAD)
        if self.scheme == MXFP4:
            self._check_mxfp4()
        if self.group not in GROUPS:
            raise ConfigError(f"--group must be one of 32, 64, 128; got {self.group}.")
        if self.method == "gptq" and not self.texts:
            raise ConfigError("--method gptq needs --texts to calibrate on: give text files.")
        if self.held_out and not self.texts:
            raise ConfigError("--held-out needs --texts: give the texts to calibrate on.")
        if self.int8_layers is not None and self.scheme != "w4a16":
            raise ConfigError(
                f"--int8-layers has no effect with --scheme {self.scheme}: leave it out."
            )
        if self.int8_budget is not None and not self.texts:
            raise ConfigError("--int8-layers needs --texts to measure the layers on.")

    def _check_mxfp4(self) -> None:
        """Raises ConfigError for options that do not apply to MXFP4 checkpoints."""
        others = (self.method, self.attention or "keep", self.head, self.group)
        if others != ("rtn", "keep", "keep", 32):
            raise ConfigError(
                "--scheme mxfp4 quantises only experts, in groups of 32, rounded to nearest: "
                "leave out --method, --attention, --head and --group."
            )

    @property
    def int8_budget(self) -> float | None:
        """The budget of --int8-layers. Raises ConfigError if it is not one."""
        if self.int8_layers is None:
            return None
        try:
            budget = float(self.int8_layers.removeprefix(_AUTO))
            if not self.int8_layers.startswith(_AUTO) or not 0 <= budget < 100:
                raise ValueError
        except ValueError:
            raise ConfigError(
                "--int8-layers must be auto:BUDGET with a budget from 0 to 100 nats, such as "
                f"auto:0.02; got {self.int8_layers!r}."
            ) from None
        return budget


def _check_one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} must be one of {', '.join(allowed)}; got {value!r}.")
