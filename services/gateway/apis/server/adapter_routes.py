"""/v1/load_lora_adapter and /v1/unload_lora_adapter: which adapters are served, as in vLLM."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field
from starlette.exceptions import HTTPException

from services.gateway.apis.shared.request_model import RequestModel
from services.gateway.apis.shared.routes import json_router
from services.gateway.core.request_service import RequestService


class LoadAdapterBody(RequestModel):
    """The adapter to load."""

    lora_name: str = Field("", description="Its name, which requests give as their model")
    lora_path: str = Field("", description="Its directory, absolute or relative to gateway.lora_directory")
    load_inplace: bool | None = Field(None, description="Replace an adapter of this name; default: false")


class UnloadAdapterBody(RequestModel):
    """The adapter to unload."""

    lora_name: str = Field("", description="Its name")


def adapter_routes(service: RequestService) -> APIRouter:
    """The routes that load and unload adapters, in all gateways at this port."""
    router = json_router(service, "Server")

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_adapter(body: LoadAdapterBody, request: Request) -> PlainTextResponse:
        """Loads a LoRA adapter from a directory below `gateway.lora_directory`."""
        _check_enabled()
        service.count_requests(1, request.state.caller)
        await service.adapters.load(
            request.state.caller, body.lora_name, body.lora_path, replaces=bool(body.load_inplace)
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_adapter(body: UnloadAdapterBody, request: Request) -> PlainTextResponse:
        """Forgets a LoRA adapter. Requests that have it go on."""
        _check_enabled()
        service.count_requests(1, request.state.caller)
        await service.adapters.unload(request.state.caller, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check_enabled() -> None:
        if not service.adapters.can_change:
            raise HTTPException(404, "adapters cannot be changed here: gateway.lora_directory is not set")

    return router
