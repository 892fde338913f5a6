"""POST /v1/embeddings, as in OpenAI's reference, with the further fields of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from services.common.config import MAX_INPUTS
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
    if isinstance(given, str):
        return [VectorInput(given)]
    if given and isinstance(given[0], int):
        return [VectorInput(given)]
    return [VectorInput(each) for each in given]


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


class EmbeddingObject(TypedDict):
    """The vector of one input: a list of numbers, or their bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class InputUsage(TypedDict):
    """Tokens of all inputs of a request, special ones included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The vectors in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: InputUsage
