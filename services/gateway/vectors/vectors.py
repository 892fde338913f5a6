"""`Vectors`: the vectors of many inputs, for all APIs that give vectors or scores. Runs in the event loop.

Each input is a request of its own to the dense worker, which batches it with all others. Those of one client's request
are started one by one, so that thousands of them delay no stream, and only some of all requests are under way, by
clients in turns. A client's own streams and small requests do not wait for its bulk. Towards the limits of an API key
all inputs of a request are one request with one answer, and their tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.common.errors import AbortedByCaller, InvalidRequest
from services.common.fairness import ClientTurns
from services.common.pooling.pooling_config import PoolingConfig, TokenHead
from services.common.sampling_params import MAX_PRIORITY
from services.gateway.access.access import Caller
from services.gateway.core.request_service import Part, RequestService
from services.gateway.features.installed import POOLING
from services.gateway.features.pooling import PooledVector
from services.gateway.request.context_length import too_long
from services.gateway.request.mixed_prompt import most_tokens, without_texts_between
from services.gateway.request.read_request import check_counts, check_size, check_token_ids, read_text_or_chat
from services.gateway.resources.gather import gather_or_cancel
from services.gateway.resources.memory_budget import HeldMemory
from services.gateway.text.tokenizer import InputLimit
from services.pb import gateway_pb2, pooling_pb2

MAX_AT_ONCE = 256  # inputs of all requests that wait or run in the dense worker, and as many of bulk ones
MAX_PROMPT_INPUTS = 64  # somebody may wait for a request with so many; one with more is bulk
_MAX_SPECIAL_TOKENS = 16  # that a tokenizer adds to an input
_TOKEN_HEADS = {
    None: pooling_pb2.TOKEN_HEAD_UNSPECIFIED,
    TokenHead.SPARSE: pooling_pb2.TOKEN_HEAD_SPARSE,
    TokenHead.COLBERT: pooling_pb2.TOKEN_HEAD_COLBERT,
}
BULK_DELAY = 10  # by how many priorities bulk comes later, unless the client says which it has

Text = str | Sequence[int | str]  # or its token ids, used as they are, maybe with texts between them


@dataclass(frozen=True, slots=True)
class VectorInput:
    """A text, two that belong together, or a chat of texts."""

    name: str  # in error messages, such as input[3]
    first: Text | gateway_pb2.Chat
    second: str | None = None
    max_own_tokens: int | None = None  # cut the last text behind so many of its own, and where the model's limit is


@dataclass(frozen=True, slots=True)
class InputOptions:
    """What all inputs of a request have in common."""

    model: str = ""
    request_id: str = ""
    user: str = ""
    traceparent: str = ""
    priority: int | None = None
    adds_special_tokens: bool | None = None  # default: to texts, not to chats
    max_tokens: int | None = None  # longer inputs are cut behind so many tokens; 0: the model's limit; None: refused
    is_cut: bool | None = None  # default: if `max_tokens` says where; False: longer inputs are refused
    keeps_last: bool = False  # texts are cut at their beginning
    cache_salt: str = ""
    all_tokens: bool = False  # a vector for each token, whatever the model is made for
    token_head: TokenHead | None = None  # with it: the layer that makes them; None: those of the model's vector
    instruction: str | None = None  # what a reranker is told of pairs; None: what its template says


@dataclass(frozen=True, slots=True)
class PooledInput:
    """An input, and what the model made of it."""

    # Of an embedding, or of a classifier's labels, before any activation: float32 [size], or [num_tokens, size] with a
    # vector for each token.
    values: np.ndarray
    token_ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Vectors:
    """There is one of a gateway."""

    def __init__(self, service: RequestService, pooling: PoolingConfig | None, max_inputs: int) -> None:
        """pooling: None if the model makes no vectors; max_inputs: of one request"""
        self.service = service
        self.max_inputs = max_inputs
        self._pooling = pooling
        self._turns = ClientTurns(MAX_AT_ONCE)
        self._bulk_turns = ClientTurns(MAX_AT_ONCE)

    @property
    def pooling(self) -> PoolingConfig:
        """How the model makes vectors. Raises `InvalidRequest` if it makes none."""
        if self._pooling is None:
            raise InvalidRequest(
                "this model makes no vectors: its checkpoint is one that generates, and model.runner is not pooling",
                "model",
            )
        return self._pooling

    @property
    def makes_any(self) -> bool:
        """Whether the model makes vectors."""
        return self._pooling is not None

    @property
    def is_classifier(self) -> bool:
        return self._pooling is not None and self._pooling.is_classifier

    @property
    def embeds(self) -> PoolingConfig:
        """How the model makes embeddings, one of each input. Raises `InvalidRequest` if it makes no such vectors."""
        self.check_makes_embeddings()
        return self.one_each

    def check_makes_embeddings(self) -> None:
        """Raises `InvalidRequest` if the model is a classifier or makes no vectors at all."""
        if self.pooling.is_classifier:
            raise InvalidRequest(
                "this model makes no embeddings: it is a classifier, ask /classify, /score or /rerank", "model"
            )

    @property
    def classes(self) -> PoolingConfig:
        """How the model makes the values of labels of each input. Raises `InvalidRequest` if it is no classifier."""
        pooling = self.one_each
        if not pooling.is_classifier:
            raise InvalidRequest("this model is no classifier: it makes embeddings", "model")
        return pooling

    @property
    def one_each(self) -> PoolingConfig:
        """How the model makes one vector of each input. Raises `InvalidRequest` if it makes one of each token."""
        if self.pooling.has_each_token:
            raise InvalidRequest("this model makes a vector of each token of an input: ask /pooling for them", "model")
        return self.pooling

    @property
    def size(self) -> int:
        """The number of values of an input."""
        pooling = self.pooling
        if pooling.is_classifier:
            return len(pooling.labels)
        return pooling.stages[-1].out_features if pooling.stages else self.service.model.hidden_size

    def check_dimensions(self, dimensions: int | None, field: str = "dimensions") -> None:
        """Raises `InvalidRequest` if vectors have fewer values. `field`: the client's name of it."""
        if dimensions is not None and dimensions > self.size:
            raise InvalidRequest(f"{field} is {dimensions}, the model's vectors have {self.size}", field)

    def check_instruction(self, instruction: str | None) -> None:
        """Raises `InvalidRequest` if there is one, and the model has no place for it."""
        template = self.pooling.template
        if instruction is not None and (template is None or template.instruction is None):
            raise InvalidRequest("this model reads no instruction: model.reranker is not qwen3", "instruction")

    def check_num_given(self, num_given: int, field: str) -> None:
        """Raises `InvalidRequest` if a request has too many elements, or none: two megabytes may hold a million."""
        if not 1 <= num_given <= self.max_inputs:
            raise InvalidRequest(
                f"{field} has {num_given} elements, must have 1 to {self.max_inputs} (gateway.max_inputs)", field
            )

    async def pool(
        self,
        inputs: Sequence[VectorInput],
        options: InputOptions,
        caller: Caller,
        held: HeldMemory,
        field: str = "input",
        num_given: int | None = None,
    ) -> list[PooledInput]:
        """The vector of each input, in order. The caller releases `held`, which takes their memory.

        field: what has the inputs, in error messages. num_given: elements of it, at most `max_inputs`; None: one for
        each input (two texts of a pair may be an input each, and equal ones are one). Raises the `TwostrokeError` of
        the first input that fails, and cancels the others then.
        """
        service = self.service
        with service.metrics.noting_rejection():
            if options.max_tokens is not None and options.max_tokens > service.model.max_model_len:
                raise InvalidRequest(
                    f"truncate_prompt_tokens is {options.max_tokens}, max_model_len is "
                    f"{service.model.max_model_len}. Please request a smaller truncation size.",
                    "truncate_prompt_tokens",
                )
            num_given = len(inputs) if num_given is None else num_given
            self.check_num_given(num_given, field)
            options = replace(options, all_tokens=options.all_tokens or self.pooling.has_each_token)
            num_vectors = sum(map(self._most_tokens, inputs)) if options.all_tokens else len(inputs)
            size = 2 if options.token_head is TokenHead.SPARSE else self.size  # a number, and the token's id
            num_bytes = 4 * size * num_vectors
            await held.reserve(num_bytes, "vectors", field, "send fewer inputs")
            held.settle()
            caller.usage.open_request()
        parts = caller.for_parts()
        results: list[PooledInput | None] = [None] * len(inputs)
        waiting, starting = iter(enumerate(inputs)), asyncio.Lock()
        num_readers, turns = min(len(inputs), MAX_AT_ONCE), self._turns
        if len(inputs) > MAX_PROMPT_INPUTS:
            turns = self._bulk_turns
            if options.priority is None:
                usual = caller.key.priority if caller.key is not None else 0
                options = replace(options, priority=min(usual + BULK_DELAY, MAX_PRIORITY))
        try:
            await gather_or_cancel(
                [self._read_some(waiting, options, parts, turns, starting, results) for _ in range(num_readers)]
            )
        finally:
            caller.usage.close_answers(1)
        return [each for each in results if each is not None]

    async def _read_some(
        self,
        waiting: Iterator[tuple[int, VectorInput]],
        options: InputOptions,
        caller: Caller,
        turns: ClientTurns,
        starting: asyncio.Lock,
        results: list[PooledInput | None],
    ) -> None:
        """Takes inputs until none is left. While it waits for a turn it holds nothing of the one before."""
        for index, each in waiting:
            async with turns.turn(caller.client_id):
                has_parts = options.request_id and len(results) > 1  # without a name each gets one of its own
                request_id = f"{options.request_id}-{index}" if has_parts else options.request_id
                results[index] = await self._read_one(each, options, request_id, caller, starting)

    async def _read_one(
        self, each: VectorInput, options: InputOptions, request_id: str, caller: Caller, starting: asyncio.Lock
    ) -> PooledInput:
        async with starting:
            await asyncio.sleep(0)  # let other tasks run: each start takes half a millisecond
            message = await self._message(each, options)
            message.request_id = request_id
            generation = await self.service.start(message, caller, Part(each.name))
        try:
            _, prompt = await generation.completions()
        finally:
            generation.close()
        vector = prompt and prompt.reports.get(POOLING.name)
        if not isinstance(vector, PooledVector):  # it was aborted
            raise AbortedByCaller(f"{each.name} was aborted before it had its vector")
        values = vector.values if options.all_tokens else vector.values[0]
        return PooledInput(values, array("i", prompt.token_ids))

    def _most_tokens(self, each: VectorInput) -> int:
        """No text has more tokens than bytes, but for the special ones."""
        if isinstance(each.first, gateway_pb2.Chat):
            return self.service.max_input_tokens
        size = most_tokens(each.first) + most_tokens(each.second or "")
        return min(self.service.max_input_tokens, size + _MAX_SPECIAL_TOKENS)

    async def _message(self, each: VectorInput, options: InputOptions) -> gateway_pb2.GenerateRequest:
        """The request for one input. Raises `InvalidRequest` if it is empty or too long."""
        name, limit, second_segment = each.name, self.service.max_input_tokens, 0
        most = limit if not options.max_tokens else min(limit, options.max_tokens)
        is_cut = options.max_tokens is not None if options.is_cut is None else options.is_cut
        if isinstance(each.first, str):
            input_limit = InputLimit(most, is_cut, each.max_own_tokens, options.keeps_last)
            token_ids, second_segment = await self._read_texts(each, options, input_limit)
        else:
            if isinstance(each.first, gateway_pb2.Chat):
                token_ids = await self._read_chat(each.first, options)
            else:
                token_ids = await self._read_pieces(each.first, name, options, most)
            token_ids = list(token_ids[:most]) if is_cut else token_ids
        if not token_ids:
            raise InvalidRequest(f"{name} has no tokens, at least 1 is required", name)
        if len(token_ids) > limit:
            raise too_long(limit, f"{name} has {len(token_ids)}", name)
        if len(token_ids) > most:
            raise InvalidRequest(f"{name} has {len(token_ids)} tokens, at most {most} are asked for", name)
        message = gateway_pb2.GenerateRequest(
            model=options.model,
            user=options.user,
            traceparent=options.traceparent,
            priority=options.priority,
            cache_salt=options.cache_salt,
            max_tokens=0,
            return_pooled=True,
            second_segment=second_segment,
            return_token_vectors=options.all_tokens,
            token_head=_TOKEN_HEADS[options.token_head],
        )
        message.sampling.temperature = 0.0
        message.prompt_token_ids.ids.extend(token_ids)
        return message

    async def _read_texts(
        self, each: VectorInput, options: InputOptions, limit: InputLimit
    ) -> tuple[list[int], int]:
        """Token ids of a text, or of two, and how many of them are before the second one's part: see `encode_input`."""
        service, texts = self.service, [str(each.first)] if each.second is None else [str(each.first), each.second]
        tokenizer, most = service.tokenizer, service.max_input_tokens
        if service.pictures is not None:
            service.pictures.check_text(sum(map(len, (*texts, options.instruction or ""))), each.name)
        num_characters = sum(map(len, texts if each.max_own_tokens is None else texts[:-1]))
        # A space may stand between two tokens. What is cut may be of any length: long texts are read in a thread.
        if not limit.is_cut and num_characters > most * (1 + tokenizer.max_token_characters):
            raise too_long(
                most,
                f"{each.name} has {num_characters} characters, and a token at most {tokenizer.max_token_characters}",
                each.name,
            )
        template = self.pooling.template
        if template is None or each.second is None:
            return await tokenizer.encode_input(texts, options.adds_special_tokens is not False, limit)
        instruction = template.instruction if options.instruction is None else options.instruction
        given = {"instruction": instruction or "", "query": str(each.first), "document": each.second or ""}
        return await tokenizer.encode_pair(template, given, limit), 0

    async def _read_chat(self, chat: gateway_pb2.Chat, options: InputOptions) -> list[int]:
        message = gateway_pb2.TokenizeRequest(chat=chat, add_special_tokens=options.adds_special_tokens)
        check_counts(message, self.service.pictures)
        check_size(message, self.service.limits)
        token_ids, _ = await read_text_or_chat(message, self.service.tokenizer)
        return token_ids

    async def _read_pieces(
        self, pieces: Sequence[int | str], name: str, options: InputOptions, most: int
    ) -> Sequence[int]:
        """Token ids, also those of texts between them; those behind `most` are not checked."""
        service, adds = self.service, options.adds_special_tokens
        token_ids = await without_texts_between(pieces, service.local_model, service.max_input_tokens, name, adds)
        check_token_ids("input", token_ids[: most + 1], service.model.vocab_size, name)
        return token_ids


def shaped(values: np.ndarray, dimensions: int | None, normalizes: bool) -> np.ndarray:
    """float32 [..., n]: the first values of each vector, with length 1 if they are normalised."""
    kept = values[..., :dimensions]
    return normalized(kept) if normalizes else kept


def normalized(values: np.ndarray) -> np.ndarray:
    """float32 [..., n] -> the same directions with length 1, as torch's `normalize` gives them."""
    return values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), np.float32(1e-12))
