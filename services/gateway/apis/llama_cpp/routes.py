"""llama.cpp's own routes: POST /completion and /infill."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.common.errors import PeerError
from services.gateway.apis.llama_cpp.conversion import llama_cpp_messages
from services.gateway.apis.llama_cpp.errors import ERROR_RESPONSES
from services.gateway.apis.llama_cpp.format import LlamaCppFormat
from services.gateway.apis.llama_cpp.schema import InfillBody, LlamaCppBody, LlamaCppObject, Props, Slot
from services.gateway.apis.llama_cpp.server_objects import server_props, server_slots
from services.gateway.apis.shared.answer import Answer
from services.gateway.apis.shared.prompts import check_prompts
from services.gateway.apis.shared.routes import json_router, streamed
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names


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
            messages = await llama_cpp_messages(body, request_id, limits)
        return Answer(service, messages, answer_format, is_stream=bool(body.stream))

    @router.get("/props", responses={200: {"model": Props}})
    async def props() -> Props:
        """llama.cpp's properties of the server: its model, context, defaults and number of slots."""
        return server_props(service)

    @router.get("/slots", responses={200: {"model": list[Slot]}})
    async def slots(request: Request, fail_on_no_slot: bool = False) -> list[Slot]:
        """The places for sequences, with those of this gateway process. fail_on_no_slot=1: a 503 if all are taken."""
        found = server_slots(service, request.state.caller.name)
        if fail_on_no_slot and all(slot["is_processing"] for slot in found):
            raise PeerError(f"no slot is free: all {len(found)} are in use")
        return found

    return router
