"""/v1/chat/completions/derender and /v1/completions/derender, as in vLLM: what /inference/v1/generate answers as text.

They are the other half of `render_routes`: a client that generates elsewhere has its token ids made an answer here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AfterValidator, Field
from pydantic_core import from_json, to_json

from services.common.config import MAX_PROMPTS
from services.common.errors import InvalidRequest
from services.common.token_logprobs import TokenLogprobs
from services.gateway.apis.openai.answer_objects import UsageObject
from services.gateway.apis.openai.chat_format import ChatFormat
from services.gateway.apis.openai.chat_schema import ChatObject, ChatRequest
from services.gateway.apis.openai.completion_schema import CompletionObject
from services.gateway.apis.openai.conversion import chat_message, refuse_embeds
from services.gateway.apis.openai.logprobs import LegacyLogprobsBuilder
from services.gateway.apis.shared.answer import PiecewiseAnswer
from services.gateway.apis.shared.logprobs import chat_logprobs
from services.gateway.apis.shared.request_model import RequestModel, TokenIdList, at_most
from services.gateway.apis.shared.routes import json_router
from services.gateway.core.answer_text import answer_text
from services.gateway.core.chunks import Completion, Finish
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.http.json_pieces import WrittenJson, json_pieces
from services.gateway.link.journal_entry import FinishReason, Timings
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.read_request import check_counts, check_token_ids, read_request
from services.gateway.resources.repeatable import created_at
from services.gateway.text.answer_parts import AnswerParts
from services.pb import gateway_pb2

NAME_OF_ID = "token_id:"
MAX_TOP = 1024  # likely tokens of one position
TOKENS_AT_ONCE = 256  # are parsed in one iteration of the event loop
UNMEASURED = Timings(None, None, None, 0.0)


class GivenTop(RequestModel):
    """One of the most likely tokens at a position."""

    token: str = Field(description="token_id:ID")
    logprob: float


class GivenLogprob(GivenTop):
    """A token of the answer."""

    top_logprobs: Annotated[list[GivenTop] | None, Field(fail_fast=True), at_most(MAX_TOP)] = None


def _as_json(given: GivenLogprob) -> bytes:
    """A token and its likely tokens, as JSON until they are written: as objects, each full collection of garbage would
    look at all of them.
    """
    top = [[each.token, each.logprob] for each in given.top_logprobs or ()]
    return to_json([given.token, given.logprob, top])


class GivenLogprobs(RequestModel):
    """Those of an answer."""

    content: Annotated[list[Annotated[GivenLogprob, AfterValidator(_as_json)]] | None, Field(fail_fast=True)] = None


class GivenChoice(RequestModel):
    """One answer."""

    index: Annotated[int, Field(ge=0)] = 0
    token_ids: Annotated[TokenIdList, Field(min_length=1)]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    logprobs: GivenLogprobs | None = None


class GivenAnswer(RequestModel):
    """What /inference/v1/generate has answered, not streamed."""

    request_id: str | None = None
    choices: Annotated[list[GivenChoice], Field(min_length=1, fail_fast=True), at_most(MAX_PROMPTS)]
    prompt_logprobs: Annotated[list[Any] | None, AfterValidator(WrittenJson)] = Field(
        None, description="Repeated in the answer"
    )
    kv_transfer_params: Annotated[dict[str, Any] | None, AfterValidator(WrittenJson)] = Field(
        None, description="Repeated in the answer"
    )


class DerenderChat(RequestModel):
    """Answers to a chat."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"stream": (False,)}

    model: str | None = None
    generate_response: GivenAnswer
    prompt_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="For the usage; default 0")
    chat_request: ChatRequest | None = Field(
        None, description="The chat: with it reasoning and calls are told apart. Default: the answers are plain text"
    )


class DerenderCompletions(RequestModel):
    """Answers to prompts."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"stream": (False,)}

    model: str | None = None
    generate_responses: Annotated[list[GivenAnswer], Field(min_length=1, fail_fast=True), at_most(MAX_PROMPTS)] = Field(
        description="One for each prompt"
    )
    prompt_tokens: Annotated[list[Annotated[int, Field(ge=0)]] | None, at_most(MAX_PROMPTS)] = Field(
        None, description="Of each prompt, for the usage; default 0"
    )


class GivenRows(Sequence[TokenLogprobs]):
    """The log-probabilities of an answer; each is made when it is asked for, from what `_as_json` has made."""

    def __init__(self, given: Sequence[bytes], field: str) -> None:
        self._given, self.field = given, field

    def named(self) -> Iterator[tuple[int, TokenLogprobs]]:
        """With the ids of the tokens. Raises `InvalidRequest` where one is not an id."""
        return map(self._row, self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: int) -> TokenLogprobs:
        return self._row(self._given[index])[1]

    def _row(self, given: bytes) -> tuple[int, TokenLogprobs]:
        token, logprob, top = from_json(given)
        return self._id_of(token), TokenLogprobs(logprob, tuple((self._id_of(name), each) for name, each in top))

    def _id_of(self, name: str) -> int:
        digits = name.removeprefix(NAME_OF_ID)
        if digits == name or not (digits.isascii() and digits.isdigit()) or len(digits) > 10:
            raise InvalidRequest(f"{self.field} has a token {name[:80]!r}, must be token_id:ID", self.field)
        return int(digits)


def derender_routes(service: RequestService) -> APIRouter:
    """The routes of one gateway."""
    router = json_router(service, "Tokens")
    tokenizer = service.tokenizer

    @router.post("/v1/chat/completions/derender", responses={200: {"model": ChatObject}})
    async def derender_chat(body: DerenderChat, request: Request) -> Response:
        """The answer to a chat from the token ids of its choices."""
        service.names_for(request.state.caller).check(body.model or "")
        given, num_prompt_tokens, model = body.generate_response, body.prompt_tokens or 0, body.model
        chat, message, asked = ChatRequest.model_construct(model=model, messages=()), None, None
        if body.chat_request is not None:
            # The answer is whole, and its log-probabilities are given.
            chat = body.chat_request.model_copy(update={"stream": None, "logprobs": None, "top_logprobs": None})
            message = message_of(chat, request)
            chat = chat.without_messages()
        del body
        texts = await texts_of([given], ["generate_response"], request)
        if message is not None:
            with client_field_names({"chat": "chat_request", "messages": "chat_request.messages"}):
                asked = await read_request(message, service.limits)
        completions = []
        for choice, text in zip(given.choices, texts, strict=True):
            finish = Finish(
                FinishReason(choice.finish_reason or "stop"),
                *(None, None, num_prompt_tokens, 0, len(choice.token_ids), 0, UNMEASURED),
            )
            completion = Completion(choice.index, text, choice.token_ids, finish=finish)
            completions.append(completion if asked is None else await read_answer(completion, asked))
        form = ChatFormat(service, chat, request.state.request_id)
        await form.begin([[] if asked is None else asked.spec.prompt_token_ids])
        whole: dict[str, Any] = {**form.whole([(completions, None)])}
        for choice, written in zip(given.choices, whole["choices"], strict=True):
            if (rows := await rows_of(choice, "generate_response")) is not None:
                written["logprobs"] = chat_logprobs(tokenizer, *rows, has_ids=False)
        whole["id"] = given.request_id or whole["id"]
        whole["usage"] = usage_of(num_prompt_tokens, given.choices)
        return answer(whole, model, given)

    @router.post("/v1/completions/derender", responses={200: {"model": CompletionObject}})
    async def derender_completion(body: DerenderCompletions, request: Request) -> Response:
        """The answer to prompts from the token ids of their choices."""
        service.names_for(request.state.caller).check(body.model or "")
        given, counts = body.generate_responses, body.prompt_tokens or [0] * len(body.generate_responses)
        if len(counts) != len(given):
            reason = f"prompt_tokens has {len(counts)} elements, generate_responses has {len(given)}"
            raise InvalidRequest(reason, "prompt_tokens")
        fields = [f"generate_responses[{i}]" for i in range(len(given))]
        texts = iter(await texts_of(given, fields, request))
        choices = [
            await completion_choice(choice, index, next(texts), field)
            for index, (field, choice) in enumerate(
                (field, choice) for field, each in zip(fields, given, strict=True) for choice in each.choices
            )
        ]
        whole = {
            "id": given[0].request_id or f"cmpl-{request.state.request_id}",
            "object": "text_completion",
            "created": created_at(),
            "choices": choices,
            "usage": usage_of(sum(counts), [choice for each in given for choice in each.choices]),
        }
        return answer(whole, body.model, given[0])

    async def texts_of(given: Sequence[GivenAnswer], fields: Sequence[str], request: Request) -> list[str]:
        """The texts of all choices, whose token ids are checked."""
        texts = []
        for field, each in zip(fields, given, strict=True):
            lists = [choice.token_ids for choice in each.choices]
            caller, held = request.state.caller, request.state.held
            texts += await service.detokenize(lists, True, caller, held, f"{field}.choices.token_ids")
        return texts

    def message_of(chat: ChatRequest, request: Request) -> gateway_pb2.GenerateRequest:
        """What a chat says of its answers. Raises `InvalidRequest`."""
        refuse_embeds(chat, "the prompt of the answers is not read")
        if any(each.images for each in chat.messages if isinstance(each.content, list)):
            raise InvalidRequest("the messages of chat_request have pictures, which are not read", "chat_request")
        message = chat_message(chat, request.state.request_id, service.limits)
        with client_field_names({"chat": "chat_request", "messages": "chat_request.messages"}):
            check_counts(message, service.pictures)
        return message

    async def read_answer(given: Completion, asked: GenerationRequest) -> Completion:
        """The answer as the chat would have got it: with reasoning and calls, and up to a stop string."""
        assert given.finish is not None
        text, parts = answer_text(asked, tokenizer), AnswerParts()
        token_ids, reason = given.token_ids, given.finish.reason
        if reason is FinishReason.STOP and token_ids[-1] in asked.spec.stop_token_ids:
            token_ids = token_ids[:-1]
        texts, stop_string = [], None
        for begin in range(0, max(1, len(token_ids)), TOKENS_AT_ONCE):
            some = token_ids[begin : begin + TOKENS_AT_ONCE]
            piece = text.append(some, reason if begin + len(some) >= len(token_ids) else None)
            texts.append(piece.text)
            parts.add(piece.deltas)
            if piece.is_cut:
                reason, stop_string = FinishReason.STOP, piece.stop_string
                break
            await service.heavy_work.turn()
        counts = {"num_reasoning_tokens": text.num_reasoning_tokens, "num_calls": text.num_calls}
        finish = replace(given.finish, reason=reason, stop_string=stop_string, **counts)
        if asked.parsing is None:
            return replace(given, text="".join(texts), finish=finish)
        parts.finish()
        return replace(given, text=parts.text(), parts=parts, finish=finish)

    async def completion_choice(choice: GivenChoice, index: int, text: str, field: str) -> dict[str, Any]:
        rows, logprobs = await rows_of(choice, field), None
        if rows is not None:
            builder = LegacyLogprobsBuilder(tokenizer, skip_special_tokens=True, is_echo=False)
            logprobs = builder.append(*rows)
        reason = choice.finish_reason or "stop"
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": None}

    async def rows_of(choice: GivenChoice, field: str) -> tuple[list[int], GivenRows] | None:
        """The ids of the tokens that have log-probabilities, and these. None if there are none."""
        if choice.logprobs is None or choice.logprobs.content is None:
            return None
        await service.heavy_work.turn()
        rows = GivenRows(choice.logprobs.content, f"{field}.choices.logprobs")
        token_ids, all_ids = [], []
        for token_id, each in rows.named():
            token_ids.append(token_id)
            all_ids += [token_id, *(likely_id for likely_id, _ in each.top)]
        check_token_ids(rows.field, all_ids, service.limits.vocab_size)
        return token_ids, rows

    def answer(whole: dict[str, Any], model: str | None, given: GivenAnswer) -> Response:
        whole["model"] = model or service.names.first
        whole["prompt_logprobs"] = given.prompt_logprobs
        whole["kv_transfer_params"] = given.kv_transfer_params
        return PiecewiseAnswer(json_pieces(whole), service.heavy_work)

    return router


def usage_of(num_prompt_tokens: int, choices: Sequence[GivenChoice]) -> UsageObject:
    """The counts as OpenAI's object."""
    num_output_tokens = sum(len(each.token_ids) for each in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
