"""llama.cpp's own routes: /completion and /infill, and what tells of the server."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from services.common.errors import PeerError
from services.common.shorten import quote
from services.gateway.apis.llama_cpp.adapters import AdapterObject, AdapterScalesBody, check_defaults, list_adapters
from services.gateway.apis.llama_cpp.conversion import llama_cpp_messages
from services.gateway.apis.llama_cpp.errors import ERROR_RESPONSES
from services.gateway.apis.llama_cpp.format import LlamaCppFormat
from services.gateway.apis.llama_cpp.schema import InfillBody, LlamaCppBody, LlamaCppObject, Props, Slot
from services.gateway.apis.llama_cpp.server_objects import server_props, server_slots
from services.gateway.apis.shared.answer import Answer
from services.gateway.apis.shared.prompts import MediaPrompt, check_prompts
from services.gateway.apis.shared.routes import json_router, streamed
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names


class Success(TypedDict):
    """It is as asked for."""

    success: bool


def llama_cpp_routes(service: RequestService) -> APIRouter:
    """The routes of one gateway."""
    router = json_router(service, "Generation", ERROR_RESPONSES)

    @router.post("/completions", include_in_schema=False)
    @router.post(
        "/completion",
        responses=streamed(
            LlamaCppObject | list[LlamaCppObject], description="The answer, or a list of answers if there are several"
        ),
    )
    async def complete(body: LlamaCppBody, request: Request) -> Response:
        """llama.cpp's own route: continues one or several prompts."""
        return await answer(body, request)

    @router.post("/infill", responses=streamed(LlamaCppObject))
    async def fill_in(body: InfillBody, request: Request) -> Response:
        """llama.cpp's own route: writes what stands between two texts."""
        return await answer(body, request)

    async def answer(body: LlamaCppBody, request: Request) -> Response:
        request_id: str = request.state.request_id
        answer_format = LlamaCppFormat(service, body)
        with client_field_names(answer_format.param_names):
            limits = service.limits
            check_prompts(body.prompts_given, limits, are_cut=body.truncate_prompt_tokens is not None)
            names = service.names_for(request.state.caller)
            given = body.prompts_given
            service.check_pictures(sum(len(each.multimodal_data) for each in given if isinstance(each, MediaPrompt)))
            messages = await llama_cpp_messages(body, request_id, limits, names)
        return Answer(service, messages, answer_format, is_stream=bool(body.stream))

    @router.get("/props", responses={200: {"model": Props}})
    async def props() -> Props:
        """llama.cpp's properties of the server: its model, context, defaults and number of slots."""
        return server_props(service)

    @router.post("/props", include_in_schema=False)
    async def change_props() -> None:
        raise HTTPException(501, "the properties of this server cannot be changed")

    @router.get("/slots", responses={200: {"model": list[Slot]}})
    async def slots(request: Request, fail_on_no_slot: str | None = None) -> list[Slot]:
        """The places for sequences, with those of this gateway process. fail_on_no_slot: a 503 if all are taken."""
        found = server_slots(service, request.state.caller.name)
        if fail_on_no_slot is not None and all(slot["is_processing"] for slot in found):
            raise PeerError(f"no slot available: all {len(found)} are in use")
        return found

    @router.post("/slots/{id_slot}", include_in_schema=False)
    async def change_slot(id_slot: str) -> None:
        raise HTTPException(501, f"slot {quote(id_slot)} cannot be saved, restored or erased: slots keep no prompts")

    @router.get("/lora-adapters")
    async def lora_adapters(request: Request) -> list[AdapterObject]:
        """The adapters that the caller may use, with the numbers by which `lora` of a request names them."""
        return list_adapters(service.names_for(request.state.caller))

    @router.post("/lora-adapters", responses={200: {"model": Success}})
    async def set_adapters(body: AdapterScalesBody, request: Request) -> Response:
        """The scales of requests that name no adapter, which can only be 0."""
        check_defaults(body.root, service.names_for(request.state.caller))
        return JSONResponse({"success": True})

    return router
