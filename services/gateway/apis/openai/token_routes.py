"""/tokenize, /detokenize, /apply-template and /tokenizer_info: text, tokens and chats, and the tokenizer's settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from services.common.errors import InvalidRequest
from services.gateway.apis.openai.chat_schema import ChatRequest
from services.gateway.apis.openai.conversion import (
    chat_message,
    chat_of,
    refuse_embeds,
    text_messages,
    tokenize_messages,
)
from services.gateway.apis.openai.token_schema import (
    ChatTokens,
    DetokenizeAnswer,
    DetokenizeBody,
    PlacedToken,
    TemplateAnswer,
    TemplateBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfo,
    TokenPiece,
)
from services.gateway.apis.shared.answer import PiecewiseAnswer
from services.gateway.apis.shared.inputs import prompt_text
from services.gateway.apis.shared.routes import json_router
from services.gateway.core.request_service import BYTES_PER_TOKEN_ID, BYTES_PER_TOKEN_TEXT, RequestService
from services.gateway.http.json_pieces import MAX_PIECE_VALUES, json_pieces, list_pieces, text_pieces
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES
from services.gateway.text.detokenizer import token_bytes
from services.gateway.text.tokenizer import Tokenizer, TokenSpan
from services.gateway.vectors.vectors import Vectors
from services.pb import gateway_pb2


def token_routes(service: RequestService, vectors: Vectors) -> APIRouter:
    """The routes for tokens of one gateway."""
    router = json_router(service, "Tokens")
    tokenizer = service.tokenizer

    @router.post("/v1/tokenize", include_in_schema=False)  # SGLang's
    @router.post("/tokenize", responses={200: {"model": TokenizeAnswer | list[PlacedToken]}})
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """The token ids of a text, of several texts, or of a chat with the generation prompt."""
        service.names_for(request.state.caller).check(body.model or "")
        if body.inputs is not None:
            return await place_tokens(body, body.inputs, request)
        is_list = isinstance(body.prompt, list)
        refuse_embeds(body, "only texts are shown as tokens")
        messages = tokenize_messages(body)
        body = body.model_copy(update={"messages": None, "tools": None})
        _check_count("prompt", len(messages), service.section.max_prompts)
        has_texts = body.return_token_strs or body.with_pieces
        num_bytes = BYTES_PER_TOKEN_TEXT if has_texts else BYTES_PER_TOKEN_ID
        lists = await service.tokenize(messages, request.state.caller, request.state.held, num_bytes)
        if body.content is not None and body.parse_special is False:  # the first time was under all limits
            lists = [await tokenizer.encode_plain(body.content, messages[0].add_special_tokens)]
            await request.state.held.reserve(num_bytes * len(lists[0]), "tokens", "prompt", "send a shorter text")
        request.state.held.settle()
        counts = [len(each) for each in lists]
        strings = [await tokenizer.write_tokens(each) for each in lists] if body.return_token_strs else None
        has_pieces = body.content is not None and body.with_pieces
        answer = {
            "count": counts if is_list else counts[0],
            "max_model_len": service.model.max_model_len,
            "tokens": _pieces(tokenizer, lists[0]) if has_pieces else lists if is_list else lists[0],
            "token_strs": strings if is_list or strings is None else strings[0],
        }
        if sum(counts) > MAX_PIECE_VALUES:
            return PiecewiseAnswer(json_pieces(answer), service.heavy_work)
        return Response(b"".join(json_pieces(answer)), media_type="application/json")

    async def place_tokens(body: TokenizeBody, given: str | list[str], request: Request) -> Response:
        """The tokens of texts in the form of Hugging Face's servers, with their places."""
        adds, prefix = body.add_special_tokens, ""
        if body.prompt_name is not None:
            prefix = prompt_text(body.prompt_name, vectors.pooling.prompts if vectors.makes_any else {})
        texts = [given] if isinstance(given, str) else given
        messages = text_messages([f"{prefix}{text}" for text in texts] if prefix else texts, adds)
        _check_count("inputs", len(messages), service.section.max_prompts)
        # They are tokenized twice: the first time under all limits.
        await service.tokenize(messages, request.state.caller, request.state.held, BYTES_PER_TOKEN_TEXT)
        request.state.held.settle()
        written = []
        for message in messages:
            written.append(await tokenizer.write_spans(message.text, _write_spans, adds is not False))
            await asyncio.sleep(0)  # let other tasks run between many short texts
        is_one = isinstance(given, str) and not vectors.makes_any
        return Response(written[0] if is_one else b"[" + b",".join(written) + b"]", media_type="application/json")

    @router.post("/v1/detokenize", include_in_schema=False)
    @router.post("/detokenize", responses={200: {"model": DetokenizeAnswer}})
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """The text of token ids, or the texts of several lists of them."""
        service.names_for(request.state.caller).check(body.model or "")
        is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
        lists = body.tokens if is_list else [body.tokens]
        _check_count("tokens", len(lists), service.section.max_prompts)
        caller, held = request.state.caller, request.state.held
        texts = await service.detokenize(lists, bool(body.skip_special_tokens), caller, held, "tokens")
        text = texts if is_list else texts[0]
        names = ("prompt", "text", "content") if body.model is None else ("prompt", "text")
        if sum(map(len, texts)) > MAX_INLINE_BYTES:
            return PiecewiseAnswer(_text_pieces(names, text), service.heavy_work)
        return JSONResponse(dict.fromkeys(names, text))

    @router.post("/v1/chat/completions/input_tokens", responses={200: {"model": ChatTokens}})
    async def count_chat(body: ChatRequest, request: Request) -> Response:
        """llama.cpp's: the number of tokens that the prompt of a chat would have."""
        service.names_for(request.state.caller).check(body.model or "")
        refuse_embeds(body, "only texts are counted")
        chat = chat_message(body, request.state.request_id, service.limits).chat
        del body
        [token_ids] = await service.tokenize([gateway_pb2.TokenizeRequest(chat=chat)], request.state.caller)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    @router.post("/apply-template", responses={200: {"model": TemplateAnswer}})
    async def apply_template(body: TemplateBody, request: Request) -> Response:
        """The text of a chat as its template writes it."""
        service.names_for(request.state.caller).check(body.model or "")
        refuse_embeds(body, "a template writes texts only")
        message = gateway_pb2.TokenizeRequest(chat=chat_of(body))
        del body
        text = await service.render_chat(message, request.state.caller)
        request.state.held.settle()
        return JSONResponse({"prompt": text})

    @router.get("/tokenizer_info", responses={200: {"model": TokenizerInfo}})
    async def tokenizer_info() -> Response:
        """Class, special tokens, chat template and settings of the tokenizer, if `gateway.tokenizer_info` is set."""
        if not service.section.tokenizer_info:
            raise HTTPException(404, "this server does not show its tokenizer: gateway.tokenizer_info is not set")
        return JSONResponse(tokenizer.info())

    return router


def _text_pieces(names: Sequence[str], text: str | list[str]) -> Iterator[bytes]:
    """A JSON object with a text, or several, under each of some names."""
    for index, name in enumerate(names):
        yield (b"," if index else b"{") + to_json(name) + b":"
        yield from text_pieces(text) if isinstance(text, str) else list_pieces(map(text_pieces, text))
    yield b"}"


def _pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Iterator[TokenPiece]:
    for token_id in token_ids:
        data = token_bytes(tokenizer.hf_tokenizer, token_id)
        try:
            yield {"id": token_id, "piece": data.decode()}
        except UnicodeDecodeError:
            yield {"id": token_id, "piece": list(data)}


def _write_spans(spans: Iterator[TokenSpan]) -> bytes:
    """Some at a time, so that their objects are never very many."""
    written = []
    while some := [_placed(each) for each in islice(spans, MAX_PIECE_VALUES)]:
        written.append(to_json(some)[1:-1])
    return b"[" + b",".join(written) + b"]"


def _placed(span: TokenSpan) -> PlacedToken:
    token_id, start, stop = span.token_id, span.start, span.stop
    return {"id": token_id, "text": span.text, "special": start is None, "start": start, "stop": stop}


def _check_count(field: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidRequest(f"{field} has {count} elements, must have 1 to {most}", field)
