"""Scores by the probabilities of tokens, of models that generate: SGLang's /v1/score, vLLM's /generative_scoring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import pydantic
from fastapi import Request
from pydantic import Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.common.errors import AbortedByCaller
from services.common.sampling_params import MAX_LOGPROB_TOKENS
from services.gateway.apis.shared.answer import Answer, Format
from services.gateway.apis.shared.generation_fields import NamedFields, Priority, User
from services.gateway.apis.shared.prompts import Prompt, check_prompts, prompt_list
from services.gateway.apis.shared.request_model import TokenIdList, UInt32, at_most
from services.gateway.apis.shared.to_message import messages_of
from services.gateway.apis.vectors.schema import InputUsage
from services.gateway.core.chunks import Completion, Finish
from services.gateway.core.chunks import Prompt as ShownPrompt
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.request.read_request import check_token_ids
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES
from services.gateway.resources.repeatable import created_at
from services.pb import gateway_pb2

BYTES_PER_ELEMENT = 24  # of a character or token id, in a prompt and its message
PARAM_NAMES = {"logprob_token_ids": "label_token_ids", "prompt": "items", "prompt_token_ids": "items"}


class LabelScoreRequest(NamedFields):
    """Each item stands behind the query: how likely is each label as the next token?"""

    model: str | None = None
    query: str | TokenIdList = Field(description="A text, or token ids if the items are token ids")
    items: Prompt = Field(description="A text, token ids, or a list of either")
    label_token_ids: Annotated[list[UInt32], Field(min_length=1), at_most(MAX_LOGPROB_TOKENS)]
    apply_softmax: bool | None = Field(
        None, description="Divide by the sum of the labels' probabilities; default: only at /generative_scoring"
    )
    item_first: bool | None = Field(None, description="true: each item stands before the query")
    user: User = None
    priority: Priority = None
    cache_salt: str | None = Field(None, description="Only requests with the same salt share prompt prefixes")

    @pydantic.model_validator(mode="after")
    def _check_kinds(self) -> LabelScoreRequest:
        kind, context = type(self.query), {"field": "items"}
        if any(type(each) is not kind for each in prompt_list(self.items)):
            raise PydanticCustomError("items", "items and query must both be texts, or both token ids", context)
        return self

    @property
    def prompts(self) -> Iterator[Any]:
        """One for each item, made when it is asked for: a long query has a copy in each."""
        pairs = ((each, self.query) if self.item_first else (self.query, each) for each in prompt_list(self.items))
        return (first + second for first, second in pairs)


class LabelUsage(InputUsage):
    """With the tokens that were generated, if they count."""

    completion_tokens: int


class LabelScores(TypedDict):
    """SGLang's answer: of each item the probability of each label."""

    object: str
    model: str
    scores: list[list[float]]
    usage: LabelUsage


class LabelScoreFormat(Format):
    """The `Format` of SGLang's answer. There are no streams."""

    param_names: Mapping[str, str] = PARAM_NAMES

    def __init__(self, service: RequestService, body: LabelScoreRequest) -> None:
        self._model = body.model or service.names.first
        self._labels = body.label_token_ids
        self._is_softmax = bool(body.apply_softmax)

    def whole(self, answers: Sequence[tuple[Sequence[Completion], ShownPrompt | None]]) -> Any:
        if not all(completion.logprobs for [completion], _ in answers):
            raise AbortedByCaller("the request was aborted before it had its scores")
        scores = [self._scores(completion) for [completion], _ in answers]
        finishes = [completion.finish for [completion], _ in answers if completion.finish is not None]
        return self._object(scores, finishes)

    def _object(self, scores: list[list[float]], finishes: Sequence[Finish]) -> Any:
        return {"object": "scoring", "model": self._model, "scores": scores, "usage": _usage(finishes, 0)}

    def _scores(self, completion: Completion) -> list[float]:
        logprobs = dict(completion.logprobs[0].top)
        probabilities = [math.exp(logprobs[each]) for each in self._labels]
        total = sum(probabilities) if self._is_softmax else 1.0
        return [each / total if total else 1 / len(probabilities) for each in probabilities]


class GenerativeScoreFormat(LabelScoreFormat):
    """The `Format` of vLLM's answer: of each item the probability of the first label."""

    def __init__(self, service: RequestService, body: LabelScoreRequest, request_id: str) -> None:
        super().__init__(service, body)
        self._id = f"generative-scoring-{request_id}"
        self._is_softmax = body.apply_softmax is not False

    def _object(self, scores: list[list[float]], finishes: Sequence[Finish]) -> Any:
        return {
            "id": self._id,
            "object": "list",
            "created": created_at(),
            "model": self._model,
            "data": [{"index": i, "object": "score", "score": first} for i, [first, *_] in enumerate(scores)],
            "usage": _usage(finishes, sum(each.num_output_tokens for each in finishes)),
        }


def _usage(finishes: Sequence[Finish], num_output_tokens: int) -> LabelUsage:
    num_prompt_tokens = sum(each.num_prompt_tokens for each in finishes)
    total = num_prompt_tokens + num_output_tokens
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens, "total_tokens": total}


async def label_scores(
    body: LabelScoreRequest, request: Request, service: RequestService, answer_format: LabelScoreFormat
) -> Answer:
    """One token is generated behind each prompt, for the log-probabilities of the labels. Raises `InvalidRequest`."""
    limits, num_items = service.limits, len(prompt_list(body.items))
    with client_field_names(PARAM_NAMES):
        check_prompts(prompt_list(body.items), limits, are_cut=False)
    with client_field_names({"prompt": "query"}):
        check_prompts([body.query], limits, are_cut=False)
        if not isinstance(body.query, str):
            check_token_ids("query", body.query, limits.vocab_size)
        num_bytes = BYTES_PER_ELEMENT * num_items * len(body.query)
        await request.state.held.reserve(num_bytes, "the query beside each item", "query", "send fewer items")
    common = gateway_pb2.GenerateRequest(
        model=body.model,
        user=body.user or "",
        cache_salt=body.cache_salt or "",
        priority=body.priority,
        max_tokens=1,
        logprobs=0,
        ignore_eos=True,
    )
    common.sampling.temperature = 0.0
    common.sampling.logprob_token_ids.extend(dict.fromkeys(body.label_token_ids))
    messages: list[gateway_pb2.GenerateRequest] = []
    for i, prompt in enumerate(body.prompts):
        if i and num_bytes > BYTES_PER_ELEMENT * MAX_INLINE_BYTES:  # all of them may take a fifth of a second
            await service.heavy_work.turn()
        with client_field_names(PARAM_NAMES):
            check_prompts([prompt], limits, are_cut=False)
        request_id = request.state.request_id if num_items == 1 else f"{request.state.request_id}-{i}"
        messages += messages_of(common, [prompt], request_id, limits)
    return Answer(service, messages, answer_format, is_stream=False)
