"""POST /v1/embeddings, as in OpenAI's reference, with the further fields of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self

import numpy as np
import pydantic
from fastapi import Request
from pydantic import AliasChoices, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.common.config import MAX_INPUTS
from services.common.errors import InvalidRequest
from services.gateway.apis.shared.inputs import Input, InputFields, Texts, input_list
from services.gateway.apis.shared.parts import MAX_PARTS, by_shape, check_parts
from services.gateway.apis.shared.request_model import RequestModel, at_most
from services.gateway.apis.shared.to_message import json_text
from services.gateway.request.read_request import MAX_MESSAGES
from services.gateway.text.read_chat import MAX_NAME_CHARACTERS
from services.gateway.vectors.packed_numbers import packed
from services.gateway.vectors.vectors import InputOptions, VectorInput
from services.pb import gateway_pb2


class TextPart(RequestModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class MessageObject(RequestModel):
    """A message of a chat, of text alone."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[TextPart], Field(fail_fast=True), at_most(MAX_PARTS), Tag("<texts>")],
        by_shape(),
    ]

    @property
    def text(self) -> str:
        """All parts as one."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class InputRequest(InputFields):
    """Inputs, or a chat that is one input, as vLLM has them."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "padding": ("do_not_pad",),
    }

    input: Input | None = Field(
        None, description="A text, token ids, texts between token ids, or a list of such inputs"
    )
    messages: Annotated[
        list[MessageObject] | None,
        Field(min_length=1, fail_fast=True, description="In place of input: a chat, which its template makes a text"),
        pydantic.BeforeValidator(check_parts),
        at_most(MAX_MESSAGES),
    ] = None
    add_generation_prompt: bool | None = Field(None, description="For messages; default false")
    continue_final_message: bool | None = Field(None, description="For messages: leave the last one open")
    chat_template: str | None = Field(
        None, description="For messages: in place of the model's; only with gateway.trust_request_chat_template"
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(64)] = Field(
        None, description="For messages: further variables of the chat template"
    )

    @pydantic.model_validator(mode="after")
    def _check_input(self) -> InputRequest:
        if (self.input is None) == (self.messages is None):
            raise PydanticCustomError("input", "exactly one of input and messages is required", {"field": "input"})
        return self

    def without_inputs(self) -> Self:
        """What the answer is written by. Thousands of messages are very many objects while the request waits."""
        return self.model_copy(update={"input": None, "messages": None})

    @property
    def inputs(self) -> list[VectorInput]:
        """All inputs, one element each."""
        if self.input is not None:
            return input_list(self.input)
        chat = gateway_pb2.Chat(
            messages=[gateway_pb2.ChatMessage(role=each.role, content=each.text) for each in self.messages or ()],
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=bool(self.continue_final_message),
            chat_template=self.chat_template or "",
            chat_template_kwargs=json_text(self.chat_template_kwargs),
        )
        return [VectorInput("messages", chat)]


class EmbeddingRequest(InputRequest):
    """The inputs, and the form of their vectors."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**InputRequest.unsupported, "input_type": ()}

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = Field(
        None,
        description="base64: the bytes of numbers as embed_dtype and endianness say; bytes: the answer is these bytes "
        "of all inputs, and the rest of it is JSON in the header metadata; bytes_only: without that; default float",
    )
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = Field(
        None, description="Of the numbers in bytes; default float32"
    )
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="Of the numbers in bytes; default native, which is little"
    )
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Keep only so many first values; a model that normalises does it after that"
    )
    normalize: bool | None = Field(None, description="Give vectors of length 1; default: as the model says")
    use_activation: bool | None = Field(
        None, validation_alias=AliasChoices("use_activation", "activation"), description="vLLM's name of normalize"
    )

    def normalizes(self, default: bool) -> bool:
        """Whether vectors get length 1. `default`: what the model says."""
        return next((given for given in (self.normalize, self.use_activation) if given is not None), default)

    @property
    def is_binary(self) -> bool:
        """Whether the answer is bytes."""
        return self.encoding_format in ("bytes", "bytes_only")

    @property
    def pack(self) -> Callable[[np.ndarray], bytes] | None:
        """Makes bytes of float32 numbers; None: they are shown as text."""
        if self.encoding_format in (None, "float"):
            return None
        return partial(packed, self.embed_dtype, ">" if self.endianness == "big" else "<")


UseActivation = Annotated[
    bool | None,
    Field(
        validation_alias=AliasChoices("use_activation", "activation"),
        description="Of a classifier: give probabilities, which is the default, or the values of the labels themselves",
    ),
]


class ClassifyRequest(InputRequest):
    """The inputs to classify, as vLLM has them."""

    use_activation: UseActivation = None


class PoolingRequest(EmbeddingRequest):
    """Like a request for embeddings, of any model that makes vectors."""

    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = Field(
        None,
        description="What the model is for; default: what it is for. A model for embed does token_embed, too: then "
        "data is a list of the vectors of all tokens, special ones included. A classifier of inputs does "
        "token_classify, too: the same of each token",
    )
    use_activation: UseActivation = None  # of embeddings: `normalize`


TextOrTexts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<texts>")],
    by_shape(),
]


class PairFields(InputFields):
    """What bodies for scores have in common."""

    instruction: str | None = Field(
        None, description="What a model that reads pairs in a template with an instruction is told; default: its own"
    )

    def options(self, request: Request) -> InputOptions:
        """With the instruction."""
        return replace(super().options(request), instruction=self.instruction)


class ScoreRequest(PairFields):
    """Pairs of texts: one with each of several, or as many firsts as seconds."""

    text_1: TextOrTexts = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="The first text of each pair, such as a question; queries and data_1 are the same",
    )
    text_2: TextOrTexts = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="The second text of each pair, such as a document; documents, items and data_2 are the same",
    )
    use_activation: UseActivation = None

    def pairs(self) -> list[tuple[str, str]]:
        """All pairs. Raises `InvalidRequest` for numbers that do not fit."""
        firsts, seconds = (each if isinstance(each, list) else [each] for each in (self.text_1, self.text_2))
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            raise InvalidRequest(
                f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}, must be one and any number, or as many",
                "text_1",
            )
        return list(zip(firsts, seconds, strict=True))


class Document(RequestModel):
    """A document as an object."""

    text: str


TextOrDocument = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Document, Tag("<document>")],
    Discriminator(lambda value: "<document>" if isinstance(value, dict | Document) else "<text>"),
]


class RerankRequest(PairFields):
    """Documents to put in order, as Cohere and Jina have them, or `texts`, as Text Embeddings Inference has them."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rank_fields": ([], ["text"]), "max_chunks_per_doc": ()}

    query: str
    documents: Annotated[list[TextOrDocument] | None, Field(fail_fast=True), at_most(MAX_INPUTS)] = None
    texts: Annotated[list[str] | None, Field(fail_fast=True), at_most(MAX_INPUTS)] = Field(
        None, description="In place of documents: the answer is a list of objects with index and score"
    )
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="Give only so many first ones; 0: all")
    return_documents: bool | None = Field(None, description="Give the texts, too; default true")
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Cohere's field: cut each document behind so many tokens, and where the model's limit is"
    )
    use_activation: UseActivation = None
    return_text: bool | None = Field(None, description="For texts: give them, too")
    raw_scores: bool | None = Field(None, description="For texts: what use_activation false is")
    truncate: bool | None = Field(None, description="For texts: cut what is longer than the model takes")

    @pydantic.model_validator(mode="after")
    def _check_documents(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            context = {"field": "documents"}
            raise PydanticCustomError("documents", "exactly one of documents and texts is required", context)
        return self

    def options(self, request: Request) -> InputOptions:
        """With `truncate`."""
        options = super().options(request)
        return replace(options, max_tokens=0) if self.truncate and options.max_tokens is None else options

    @property
    def activation(self) -> bool | None:
        """`use_activation`, by either name."""
        return False if self.raw_scores else self.use_activation

    @property
    def field(self) -> str:
        """The name of the field with the documents."""
        return "documents" if self.texts is None else "texts"

    def all_texts(self) -> list[str]:
        """The documents."""
        given = self.documents if self.texts is None else self.texts
        return [each if isinstance(each, str) else each.text for each in given or ()]


class EmbeddingObject(TypedDict):
    """The vector of one input: a list of numbers, or their bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class InputUsage(TypedDict):
    """Tokens of all inputs of a request, special ones included."""

    prompt_tokens: int
    total_tokens: int


class InputList(TypedDict):
    """What lists of vectors, classes and scores have in common, beside their `data`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: InputUsage


class ClassObject(TypedDict):
    """The likeliest label of an input, and the probabilities of all of them."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(InputList):
    """The classes in the order of the inputs."""

    data: list[ClassObject]


class ScoreObject(TypedDict):
    """How well the texts of a pair belong together."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(InputList):
    """The scores in the order of the pairs."""

    data: list[ScoreObject]


class DocumentObject(TypedDict):
    """A document's text."""

    text: str


class RankObject(TypedDict):
    """A document by its index in the request."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentObject]


class ScoredText(TypedDict):
    """One of `texts` by its index in the request."""

    index: int
    score: float
    text: NotRequired[str]


class RankList(TypedDict):
    """The documents, the best first. `meta` is Cohere's."""

    id: str
    model: str
    usage: InputUsage
    meta: dict[str, Any]
    results: list[RankObject]


class PoolingObject(TypedDict):
    """The vector of one input, or that of each of its tokens."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


class PoolingList(InputList):
    """The vectors in the order of the inputs."""

    data: list[PoolingObject]


class EmbeddingList(InputList):
    """The vectors in the order of the inputs."""

    data: list[EmbeddingObject]
