"""/v1/models: the models that are served, as OpenAI or Anthropic shows them. Both have these paths."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from fastapi import APIRouter, Request

from services.gateway.apis.anthropic.answer_objects import ModelInfo, ModelPage
from services.gateway.apis.anthropic.errors import is_anthropic
from services.gateway.apis.openai.answer_objects import CapableModel, ModelList, ModelObject
from services.gateway.core.request_service import RequestService
from services.gateway.http.errors import ERROR_RESPONSES
from services.gateway.request.model_limits import ModelNames


def model_routes(service: RequestService) -> APIRouter:
    """The routes that tell of the model of one gateway, and of its adapters."""
    router = APIRouter(tags=["Server"])
    start = int(time.time())
    model_errors = {status: ERROR_RESPONSES[status] for status in (400, 404, 503)}

    def model_object(name: str, names: ModelNames) -> ModelObject:
        adapter = names.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": start,
            "owned_by": "twostroke",
            "root": names.root if adapter is None else adapter.path,
            "parent": None if adapter is None else names.first,
            "max_model_len": service.model.max_model_len,
            "vocab_size": service.model.vocab_size,
            "type": "base",
            "capabilities": {
                "completion_chat": service.generates,
                "completion_fim": False,
                "function_calling": service.tokenizer.chat_formats.tools is not None,
                "vision": service.pictures is not None,
            },
        }

    def capable_model(name: str) -> CapableModel:
        model: CapableModel = {"name": name, "model": name, "type": "model", "capabilities": []}
        if service.generates:
            model["capabilities"].append("completion")
            if service.pictures is not None:
                model["capabilities"].append("multimodal")
        return model

    def model_info(name: str) -> ModelInfo:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(start, UTC).isoformat(),
            "max_input_tokens": service.model.max_model_len,
            "max_tokens": service.model.max_model_len,
        }

    @router.get("/models", include_in_schema=False, response_model=None)
    @router.get("/v1/models", responses={503: ERROR_RESPONSES[503]})
    async def list_models(request: Request) -> ModelList | ModelPage:
        """The served model under its names, and the adapters that the caller may use.

        With the header anthropic-version as Anthropic.
        """
        served = service.names_for(request.state.caller)
        names = [*served.names, *served.adapters]
        if is_anthropic(request.scope):
            infos = [model_info(name) for name in names]
            return {"data": infos, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        objects = [model_object(name, served) for name in names]
        return {"object": "list", "data": objects, "models": list(map(capable_model, names))}

    @router.get("/v1/models/{name:path}", responses=model_errors)
    async def retrieve_model(name: str, request: Request) -> ModelObject | ModelInfo:
        """The served model or an adapter, by its name."""
        names = service.names_for(request.state.caller)
        names.check(name)
        return model_info(name) if is_anthropic(request.scope) else model_object(name, names)

    return router
