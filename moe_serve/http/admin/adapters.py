"""The admin routes that load and unload adapters, under vLLM's names. They need an admin key.

POST /v1/load_lora_adapter {"lora_name": ..., "lora_path": ...} and
POST /v1/unload_lora_adapter {"lora_name": ...}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from moe_serve.adapters.adapter import AdapterVersion
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.errors import CheckpointError, InvalidRequestError
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.schema.json_body import read_json_object


def _body(*fields: str) -> dict[str, Any]:
    properties = {field: {"type": "string"} for field in fields}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_LOAD, _UNLOAD = ("lora_name", "lora_path"), ("lora_name",)


def adapter_router(server: ServerContext) -> APIRouter:
    router = APIRouter()
    model, max_bytes = server.model, server.config.max_body_bytes

    def adapters() -> AdapterRegistry:
        if model.adapters is None:
            raise InvalidRequestError(
                "This server serves no adapters: start it with --enable-lora.",
                param=None,
                code="adapters_disabled",
            )
        return model.adapters

    @router.post("/v1/load_lora_adapter", openapi_extra=_body(*_LOAD))
    async def load(request: Request) -> dict[str, Any]:
        values = _strings(await read_json_object(request, max_bytes), _LOAD)
        name = values["lora_name"]
        if name == model.name or name.startswith(f"{model.name}:"):
            raise InvalidRequestError(
                f"lora_name is {name[:200]!r}, the name of the model itself or one that begins "
                "with it and a colon, by which requests name other adapters: choose another.",
                param="lora_name",
            )
        try:
            version = await asyncio.to_thread(adapters().load_below_root, name, values["lora_path"])
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
    }


def _strings(body: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, str]:
    """Returns the fields of a body, which must all be strings."""
    unknown = sorted(body.keys() - set(fields))
    if unknown:
        raise InvalidRequestError(
            f"Unknown field {unknown[0][:100]!r}. The known fields are {', '.join(fields)}.",
            param=unknown[0][:100],
        )
    for field in fields:
        if not isinstance(body.get(field), str) or not body[field]:
            raise InvalidRequestError(
                f"{field} must be a text, and not empty, got {body.get(field)!r:.100}.", param=field
            )
    return {field: str(body[field]) for field in fields}
