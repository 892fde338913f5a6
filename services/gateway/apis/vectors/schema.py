"""POST /v1/embeddings, as in OpenAI's reference, with the further fields of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from services.common.config import MAX_INPUTS
from services.common.errors import InvalidRequest
from services.gateway.apis.shared.request_model import CountOrAll, Int32, RequestModel, TokenIdList, at_most
from services.gateway.vectors.vectors import InputOptions, VectorInput


def _kind_of_input(value: Any) -> str:
    """Decides by the first element, so that a long list is not tried as each kind in turn."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    return {str: "<texts>", list: "<token_id_lists>"}.get(type(first), "<token_ids>")


Texts = Annotated[list[str], Field(fail_fast=True), at_most(MAX_INPUTS)]
Input = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[TokenIdList, Tag("<token_ids>")]
    | Annotated[list[TokenIdList], Field(fail_fast=True), at_most(MAX_INPUTS), Tag("<token_id_lists>")],
    Discriminator(_kind_of_input),
]


def input_list(given: str | list[Any]) -> list[VectorInput]:
    """All inputs of an `Input`, one element each."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [VectorInput("input", given)]
    return [VectorInput(f"input[{i}]" if len(given) > 1 else "input", each) for i, each in enumerate(given)]


class InputFields(RequestModel):
    """What bodies for vectors have in common."""

    model: str | None = None
    user: str | None = Field(None, description="Name of the end user, for logs only")
    priority: Int32 | None = Field(None, description="A lower number is served earlier")
    truncate_prompt_tokens: CountOrAll | None = Field(
        None,
        description="Cut longer inputs behind so many tokens; -1: as many as the model takes. Default: refuse them",
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens that the model expects around a text; default true"
    )

    def options(self, request_id: str, traceparent: str) -> InputOptions:
        """The same for all inputs of the body."""
        cut = self.truncate_prompt_tokens
        return InputOptions(
            model=self.model or "",
            request_id=request_id,
            user=self.user or "",
            traceparent=traceparent,
            priority=self.priority,
            adds_special_tokens=self.add_special_tokens is not False,
            max_tokens=None if cut is None else max(0, cut),
        )


class EmbeddingRequest(InputFields):
    """The inputs, and the form of their vectors."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (),
        "input_type": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }

    input: Input = Field(description="A text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: the bytes of little-endian 32-bit floats; default float"
    )
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Keep only so many first values; a model that normalises does it after that"
    )
    normalize: bool | None = Field(None, description="Give vectors of length 1; default: as the model says")


class ClassifyRequest(InputFields):
    """The inputs to classify, as vLLM has them."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (),
        "activation": (True,),
        "use_activation": (True,),
    }

    input: Input = Field(description="A text, token ids, or a list of either")


class PoolingRequest(EmbeddingRequest):
    """Like a request for embeddings, of any model that makes vectors."""

    task: Literal["embed", "classify", "score"] | None = Field(
        None, description="What the model is for; default: what it is for"
    )


TextOrTexts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]


class ScoreRequest(InputFields):
    """Pairs of texts: one with each of several, or as many firsts as seconds."""

    text_1: TextOrTexts = Field(description="The first text of each pair, such as a question")
    text_2: TextOrTexts = Field(description="The second text of each pair, such as a document")

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


class RerankRequest(InputFields):
    """Documents to put in order, as Cohere and Jina have them."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rank_fields": ([], ["text"]), "max_chunks_per_doc": ()}

    query: str
    documents: Annotated[list[TextOrDocument], Field(fail_fast=True), at_most(MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="Give only so many first ones; 0: all")
    return_documents: bool | None = Field(None, description="Give the texts, too; default true")
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Cohere's field: cut each document behind so many tokens, and where the model's limit is"
    )

    def texts(self) -> list[str]:
        """The documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class EmbeddingObject(TypedDict):
    """The vector of one input: a list of numbers, or their bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class InputUsage(TypedDict):
    """Tokens of all inputs of a request, special ones included."""

    prompt_tokens: int
    total_tokens: int


class ClassObject(TypedDict):
    """The likeliest label of an input, and the probabilities of all of them."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(TypedDict):
    """The classes in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassObject]
    usage: InputUsage


class ScoreObject(TypedDict):
    """How well the texts of a pair belong together."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    """The scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: InputUsage


class DocumentObject(TypedDict):
    """A document's text."""

    text: str


class RankObject(TypedDict):
    """A document by its index in the request."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentObject]


class RankList(TypedDict):
    """The documents, the best first. `meta` is Cohere's."""

    id: str
    model: str
    usage: InputUsage
    meta: dict[str, Any]
    results: list[RankObject]


class PoolingObject(TypedDict):
    """The vector of one input."""

    object: Literal["pooling"]
    index: int
    data: list[float] | str


class PoolingList(TypedDict):
    """The vectors in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingObject]
    usage: InputUsage


class EmbeddingList(TypedDict):
    """The vectors in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: InputUsage
