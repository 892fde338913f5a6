"""POST /tokenize and /detokenize: what the model would see, and what it means."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from services.common.errors import UnknownModel
from services.gateway.frontend import Frontend
from services.gateway.http.errors import ERROR_RESPONSES
from services.gateway.http.json_route import StrictJsonRoute
from services.gateway.http.schemas.tokens import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from services.gateway.http.to_message import chat_of
from services.pb import gateway_pb2


def token_routes(frontend: Frontend) -> APIRouter:
    """Of one gateway."""
    router = APIRouter(route_class=StrictJsonRoute, tags=["Tokens"], responses=ERROR_RESPONSES)

    @router.post("/tokenize", response_class=Response, responses={200: {"model": TokenizeAnswer}})
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Token ids of a text, or of a chat with the generation prompt."""
        body.log_unknown_fields(request.state.request_id)
        check_model(frontend, body.model)
        message = gateway_pb2.TokenizeRequest(add_special_tokens=body.add_special_tokens)
        if body.prompt is not None:
            message.text = body.prompt
        else:
            message.chat.CopyFrom(chat_of(body))
        token_ids = await frontend.tokenize(message, request.state.caller)
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": frontend.model.max_model_len,
                "tokens": token_ids,
                "token_strs": frontend.tokenizer.tokens(token_ids) if body.return_token_strs else None,
            }
        )

    @router.post("/detokenize", response_class=Response, responses={200: {"model": DetokenizeAnswer}})
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """The text of token ids."""
        body.log_unknown_fields(request.state.request_id)
        check_model(frontend, body.model)
        text = frontend.detokenize(body.tokens, bool(body.skip_special_tokens), request.state.caller, "tokens")
        return JSONResponse({"prompt": text})

    return router


def check_model(frontend: Frontend, name: str | None) -> None:
    """Raises `UnknownModel` for another model than the served one."""
    if name and name != frontend.model_name:
        raise UnknownModel(f"model {name!r} is not served here, {frontend.model_name!r} is", "model")
