"""The prompts of one request: a text, token ids, or a list of either, and for llama.cpp texts between token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import pydantic
from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from services.common.config import MAX_PROMPTS
from services.common.errors import InvalidRequest
from services.gateway.apis.shared.request_model import (
    MAX_INT64,
    MIN_INT64,
    Int64,
    RequestModel,
    TokenIdList,
    at_most,
)
from services.gateway.request.context_length import too_long
from services.gateway.request.model_limits import ModelLimits

MAX_TEXTS = 64  # that one prompt has between token ids: each takes half a millisecond
MEDIA_MARKER = "<__media__>"  # llama.cpp's, where a picture stands in a text

def _kind_of_strict(value: Any) -> str:
    """Decides by the first element, so that a long list is not tried as each kind in turn."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    return {str: "<texts>", list: "<token_id_lists>"}.get(type(first), "<token_ids>")


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("<texts>")]
    | Annotated[TokenIdList, Tag("<token_ids>")]
    | Annotated[list[TokenIdList], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("<token_id_lists>")],
    Discriminator(_kind_of_strict),
]


def kind_of_prompts(value: Any) -> str:
    """Decides by the kinds of elements, so that a long list is not tried as each kind in turn."""
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds & {list, dict} or kinds == {str}:
            return "<prompts>"
    return _kind_of_prompt(value)


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    return "<pieces>" if str in map(type, value) else "<token_ids>"


class MediaPrompt(RequestModel):
    """A text with pictures, as llama.cpp has it: `MEDIA_MARKER` stands for each."""

    prompt_string: str
    multimodal_data: Annotated[list[str], at_most(MAX_TEXTS)] = Field(description="Files of pictures in base64")

    def __len__(self) -> int:
        return len(self.prompt_string)

    @pydantic.model_validator(mode="after")
    def _check_markers(self) -> MediaPrompt:
        if (count := self.prompt_string.count(MEDIA_MARKER)) != len(self.multimodal_data):
            context = {"count": len(self.multimodal_data), "marker": MEDIA_MARKER, "markers": count}
            raise PydanticCustomError("media", "has {count} files for {markers} of {marker} in prompt_string", context)
        return self


def _kind_with_media(value: Any) -> str:
    return "<media>" if isinstance(value, dict) else _kind_of_prompt(value)


def _kind_of_prompts_with_media(value: Any) -> str:
    return "<media>" if isinstance(value, dict) else kind_of_prompts(value)


def _without_plain_objects(value: Any) -> Any:
    """The same as `without_objects`, but for objects with a list of pictures, which may be empty."""
    if isinstance(value, list):
        return [_without_plain_objects(each) for each in value] if dict in map(type, value) else value
    return value if isinstance(value, dict) and value.get("multimodal_data") is not None else _text_of(value)


def without_objects(value: Any) -> Any:
    """The prompts, in which an object with a text, as llama.cpp has it for pictures, or with parts is the text."""
    if isinstance(value, list):
        return [_text_of(each) for each in value] if dict in map(type, value) else value
    return _text_of(value)


def _text_of(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(text := value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            raise PydanticCustomError("media", "multimodal_data is not supported")
        return text
    if isinstance(value, dict) and isinstance(parts := value.get("content"), list) and parts:
        if len(parts) > MAX_TEXTS:
            context = {"count": len(parts), "most": MAX_TEXTS}
            raise PydanticCustomError("texts", "has {count} parts, at most {most} allowed", context)
        texts = [each.get("text") for each in parts if isinstance(each, dict) and each.get("type") == "text"]
        if len(texts) == len(parts) and set(map(type, texts)) == {str}:
            return "".join(texts)
        raise PydanticCustomError("parts", "has parts that are no texts: others are not supported")
    return value


def _check_pieces(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Does the same as `check`, but faster for a list without errors, and limits the number of texts."""
    token_ids = [each for each in value if type(each) is int]
    num_texts = list(map(type, value)).count(str)
    if num_texts > MAX_TEXTS:
        context = {"count": num_texts, "most": MAX_TEXTS}
        raise PydanticCustomError("texts", "has {count} texts between token ids, at most {most} allowed", context)
    if num_texts + len(token_ids) < len(value):
        return check(value)
    if token_ids and (min(token_ids) < MIN_INT64 or max(token_ids) > MAX_INT64):
        return check(value)
    return value


Pieces = Annotated[list[str | Int64], Field(fail_fast=True), pydantic.WrapValidator(_check_pieces)]
OnePrompt = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TokenIdList, Tag("<token_ids>")] | Annotated[Pieces, Tag("<pieces>")],
    Discriminator(_kind_of_prompt),
]


def prompts_of(most: int, kind: Callable[[Any], str]) -> Any:
    """The type of a field with up to so many prompts as llama.cpp has them, which may have texts between token ids."""
    return Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[TokenIdList, Tag("<token_ids>")]
        | Annotated[Pieces, Tag("<pieces>")]
        | Annotated[list[OnePrompt], Field(fail_fast=True), at_most(most), Tag("<prompts>")],
        Discriminator(kind),
        pydantic.BeforeValidator(without_objects),
    ]


def prompts_with_media(most: int) -> Any:
    """The same, which may also be texts with pictures."""
    one = Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[TokenIdList, Tag("<token_ids>")]
        | Annotated[Pieces, Tag("<pieces>")]
        | Annotated[MediaPrompt, Tag("<media>")],
        Discriminator(_kind_with_media),
    ]
    return Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[TokenIdList, Tag("<token_ids>")]
        | Annotated[Pieces, Tag("<pieces>")]
        | Annotated[MediaPrompt, Tag("<media>")]
        | Annotated[list[one], Field(fail_fast=True), at_most(most), Tag("<prompts>")],
        Discriminator(_kind_of_prompts_with_media),
        pydantic.BeforeValidator(_without_plain_objects),
    ]


def prompt_list(given: str | list[Any]) -> list[Any]:
    """All prompts of such a field, one element each; none of an empty list."""
    if isinstance(given, list) and (not given or {list, dict, MediaPrompt} & set(map(type, given))):
        return given
    return given if kind_of_prompts(given) == "<prompts>" else [given]  # type: ignore[return-value]


def check_prompts(
    prompts: Sequence[str | Sequence[Any]], limits: ModelLimits, *, are_cut: bool, num_embeds: int = 0
) -> None:
    """Raises `InvalidRequest` for no prompts, too many, or one that cannot fit.

    `are_cut`: whether the request says how many of their tokens to keep. `num_embeds`: prompts of embeddings beside
    them.
    """
    num_prompts = num_embeds + len(prompts)
    if not 1 <= num_prompts <= limits.max_prompts:
        allowed = f"must be 1 to {limits.max_prompts} (gateway.max_prompts)"
        raise InvalidRequest(f"there are {num_prompts} prompts, {allowed}", "prompt")
    longest = max(prompts, key=len, default=None)
    most = limits.max_prompt_len
    if isinstance(longest, list) and len(longest) > most and not are_cut:  # before copying them costs time
        raise too_long(most, f"a prompt has {len(longest)}", "prompt", len(longest))
