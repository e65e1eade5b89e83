"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from moe_serve.http.generation.context import ServerContext


def model_router(server: ServerContext) -> APIRouter:
    router = APIRouter()
    model = server.model
    entry: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "moe-serve",
        "root": model.root or model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @router.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> dict[str, Any]:
        model.check_name(model_id)
        return entry

    return router
