"""The admin routes that load and unload adapters, under vLLM's names. They need an admin key.

POST /v1/load_lora_adapter {"lora_name": ..., "lora_path": ..., "pinned": false} and
POST /v1/unload_lora_adapter {"lora_name": ...}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import Request

from moe_serve.adapters.adapter import AdapterVersion
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.errors import CheckpointError, InvalidRequestError
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.wire.late_routes import LateRouter


def _body(*fields: str, flag: str | None = None) -> dict[str, Any]:
    properties = {field: {"type": "string"} for field in fields}
    if flag is not None:
        properties[flag] = {"type": "boolean"}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_LOAD, _UNLOAD, _PINNED = ("lora_name", "lora_path"), ("lora_name",), "pinned"


def adapter_router(server: ServerContext) -> LateRouter:
    router = LateRouter()
    model, max_bytes = server.model, server.config.max_body_bytes

    def adapters() -> AdapterRegistry:
        if model.adapters is None:
            raise InvalidRequestError(
                "This server serves no adapters: start it with --enable-lora.",
                param=None,
                code="adapters_disabled",
            )
        return model.adapters

    @router.post("/v1/load_lora_adapter", openapi_extra=_body(*_LOAD, flag=_PINNED))
    async def load(request: Request) -> dict[str, Any]:
        body = dict(await read_json_object(request, max_bytes))
        is_pinned = body.pop(_PINNED, False)
        if not isinstance(is_pinned, bool):
            raise InvalidRequestError(
                f"{_PINNED} must be true or false, got {is_pinned!r:.100}.", param=_PINNED
            )
        values = _strings(body, _LOAD)
        name = values["lora_name"]
        if name == model.name or name.startswith(f"{model.name}:"):
            raise InvalidRequestError(
                f"lora_name is {name[:200]!r}, but must not be the name of the model itself, or "
                "begin with it and a colon, by which requests name other adapters.",
                param="lora_name",
            )
        try:
            read = partial(adapters().load_below_root, is_pinned=is_pinned)
            version = await asyncio.to_thread(read, name, values["lora_path"])
        except CheckpointError as error:
            raise InvalidRequestError(
                f"The adapter cannot be served: {error}", param="lora_path", code="invalid_adapter"
            ) from None
        return _shown(version)

    @router.post("/v1/unload_lora_adapter", openapi_extra=_body(*_UNLOAD))
    async def unload(request: Request) -> dict[str, Any]:
        values = _strings(await read_json_object(request, max_bytes), _UNLOAD)
        return _shown(adapters().unload(values["lora_name"]))

    return router


def _shown(version: AdapterVersion) -> dict[str, Any]:
    return {
        "lora_name": version.name,
        "kind": version.kind,
        "rank": version.rank,
        "digest": version.digest.hex(),
        _PINNED: version.is_pinned,
    }


def _strings(body: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, str]:
    """Returns the fields of a body, which must all be strings."""
    unknown = sorted(body.keys() - set(fields))
    if unknown:
        raise InvalidRequestError(
            f"Unknown field {unknown[0][:100]!r}. The known fields are {', '.join(fields)}"
            f"{' and pinned' if fields == _LOAD else ''}.",
            param=unknown[0][:100],
        )
    for field in fields:
        if not isinstance(body.get(field), str) or not body[field]:
            raise InvalidRequestError(
                f"{field} must be a string that is not empty, got {body.get(field)!r:.100}.",
                param=field,
            )
    return {field: str(body[field]) for field in fields}
