"""The parts of a model's folder that the HTTP side needs.

They are read before the weights, so that faults are reported at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_serve.config.sections import Config
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.fingerprint import system_fingerprint
from moe_serve.engine.opened_model import model_folder
from moe_serve.engine.request.kv_window import KVWindowRules
from moe_serve.errors import ConfigError
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.model.hub.hub_name import HubName, folder_model_name, snapshot_name
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer, read_json_file

_DEMO_MODEL_NAME = "moe-serve-demo"
_FILE_NAMES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # if tokenizer_config.json does not state it
_NO_DESCRIPTION: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    folder: Path
    name: str  # model name that requests give
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @classmethod
    def load(cls, config: Config) -> ModelFiles:
        """Reads the files. Raises what Tokenizer and ChatTemplate raise."""
        folder, name = model_folder(config.engine.model), config.server.served_model_name
        is_demo = config.engine.model.path is None
        tokenizer = Tokenizer.load(folder)
        return cls(
            folder=folder,
            name=name or (_DEMO_MODEL_NAME if is_demo else folder_model_name(folder)),
            tokenizer=tokenizer,
            chat_template=ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens),
        )

    @property
    def is_named_otherwise(self) -> bool:
        """True if the name is neither that of the folder nor of the demonstration model."""
        return self.name not in (folder_model_name(self.folder), _DEMO_MODEL_NAME)

    @property
    def hub_name(self) -> HubName | None:
        """The name on the hub, with the commit, of files in the shared cache."""
        return snapshot_name(self.folder)

    def served(
        self,
        engine: AsyncEngine,
        built: BuiltEngine,
        config: Config,
        description: Mapping[str, str] = _NO_DESCRIPTION,
    ) -> ServedModel:
        """Returns the served model. Reads the weights once more for the fingerprint (large ones in
        samples). Raises ConfigError if an adapter has the model's name."""
        versions = [] if built.adapters is None else built.adapters.versions()
        for name in [version.name for version in versions]:
            if name == self.name or name.startswith(f"{self.name}:"):
                raise ConfigError(
                    f"adapters.modules has the name {name!r}, which is the model's or begins with "
                    "it and a colon: choose another."
                )
        return ServedModel(
            name=self.name,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            created=int(time.time()),
            max_model_len=engine.max_model_len,
            ids_per_token=built.spec.router.top_k * built.spec.num_sparse_layers,
            root=_DEMO_MODEL_NAME
            if config.engine.model.path is None
            else folder_model_name(self.folder),
            fingerprint=system_fingerprint(built.layout, config),
            tokenizer_info=self.tokenizer_info() if config.server.tokenizer_info else None,
            description=description,
            adapters=built.adapters,
            kv_windows=KVWindowRules.of(
                built.spec,
                config.engine.cache.page_size,
                is_allowed=config.engine.cache.allow_kv_window,
            ),
        )

    def tokenizer_info(self) -> Mapping[str, Any]:
        """Returns tokenizer_config.json without file names, and the chat template."""
        config = read_json_file(self.folder / "tokenizer_config.json")
        told = {name: value for name, value in config.items() if name not in _FILE_NAMES}
        if self.chat_template is not None:
            told["chat_template"] = self.chat_template.source
        return {**told, "tokenizer_class": str(config.get("tokenizer_class", _TOKENIZER_CLASS))}
