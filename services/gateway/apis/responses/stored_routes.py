"""GET and DELETE of /v1/responses/{id}: responses that the gateway has kept for its client."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from services.common.errors import InvalidRequest, NotFound
from services.common.shorten import quote
from services.gateway.apis.responses.answer_objects import ResponseObject
from services.gateway.apis.responses.background import BackgroundResponses
from services.gateway.apis.responses.event_log import LoggedEvents
from services.gateway.apis.responses.response_store import ResponseStore, StoredAnswer, StoredResponse
from services.gateway.apis.responses.schema import LOGPROBS
from services.gateway.apis.responses.stored_record import owner_of, read_conversation
from services.gateway.core.request_service import RequestService
from services.gateway.http.errors import ERROR_RESPONSES

PATH = "/v1/responses/{response_id}"
MAX_ITEMS = 100  # of one page, as with OpenAI


def stored_response_routes(
    service: RequestService, store: ResponseStore | None, background: BackgroundResponses
) -> APIRouter:
    """The routes of one gateway. `store`: None if it stores nothing; then every answer is a 404."""
    router = APIRouter(tags=["Responses"], responses=ERROR_RESPONSES)

    @router.get(PATH, responses={200: {"model": ResponseObject}})
    async def find_response(
        response_id: str, request: Request, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        """A stored response, or its events behind the one with the `sequence_number` `starting_after`."""
        if LOGPROBS in (*request.query_params.getlist("include"), *request.query_params.getlist("include[]")):
            raise InvalidRequest(f"include has {LOGPROBS}, which are not stored", "include")
        if not stream:
            if starting_after is not None:
                raise InvalidRequest("starting_after is for streams: stream is not true", "starting_after")
            return StoredAnswer(_find(response_id, request))
        log = _find(response_id, request).events
        if log is None:
            raise InvalidRequest(
                "stream is true, but the response has no events: only those begun with stream and background have, "
                "unless they were too large to be stored",
                "stream",
            )
        return LoggedEvents(log, starting_after)

    @router.delete(PATH)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forgets a stored response, and ends one that is running. Responses that continue it remain."""
        _find(response_id, request)
        assert store is not None
        owner = owner_of(request.state.caller)
        await background.cancel(owner, response_id)
        store.delete(owner, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.get(PATH + "/input_items")
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The items that the model was given for a stored response, those of the conversation before it included."""
        stored = _find(response_id, request)
        limit_and_work = service.section.max_body_values, service.heavy_work
        async with read_conversation(stored.input_items, *limit_and_work, request.state.held, None) as items:
            request.state.held.settle()
            return JSONResponse(_page(items, limit, order, after))

    @router.post(PATH + "/cancel", responses={200: {"model": ResponseObject}})
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Ends a response in the background. One that has ended stays as it is, as with OpenAI."""
        if not _find(response_id, request).is_background:
            raise InvalidRequest("Cannot cancel a synchronous response. Only one in the background can be", None)
        ended = await background.cancel(owner_of(request.state.caller), response_id)
        return StoredAnswer(ended or _get(response_id, request))  # the store may have dropped it since

    def _find(response_id: str, request: Request) -> StoredResponse:
        service.count_requests(1, request.state.caller)
        return _get(response_id, request)

    def _get(response_id: str, request: Request) -> StoredResponse:
        if store is None:
            raise NotFound(
                f"Response with id {quote(response_id)} not found: this server stores none (gateway.store_responses)",
                "response_id",
            )
        owner = owner_of(request.state.caller)
        stored = background.find(owner, response_id) or store.get(owner, response_id)
        if stored is None:
            raise NotFound(f"Response with id {quote(response_id)} not found: it is none of this client", "response_id")
        return stored

    return router


def _page(items: list[Any], limit: int, order: Literal["asc", "desc"], after: str | None) -> dict[str, Any]:
    """At most `limit` of the items, those behind the one with the id `after`. Raises `InvalidRequest`."""
    if order == "desc":
        items.reverse()
    if after is not None:
        index = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if index is None:
            raise InvalidRequest(f"after is {quote(after)}, which is the id of no item", "after")
        items = items[index + 1 :]
    page = items[:limit]
    ids = [item["id"] for item in page]
    return {
        "object": "list",
        "data": page,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": len(items) > limit,
    }
