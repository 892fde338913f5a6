"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.gateway.http.schemas.base import Int64, RequestModel, at_most
from services.gateway.http.schemas.chat import (
    MAX_MESSAGES,
    AddGenerationPrompt,
    ChatMessageObject,
    ContinueFinalMessage,
    TemplateKwargs,
)


class TokenizeBody(RequestModel):
    """A text, or a chat; exactly one."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "tools": ([],),
    }
    model: str | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessageObject] | None, at_most(MAX_MESSAGES)] = Field(
        None, min_length=1, fail_fast=True
    )
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template_kwargs: TemplateKwargs = None
    add_special_tokens: bool | None = Field(
        None, description="Add those expected around a prompt; default: true for a text, false for a chat"
    )
    return_token_strs: bool | None = Field(None, description="Give each token as the tokenizer writes it")

    @pydantic.model_validator(mode="after")
    def _check_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            message = "exactly one of prompt and messages is required"
            raise PydanticCustomError("input", message, {"field": "prompt"})
        return self


class DetokenizeBody(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[Int64], Field(fail_fast=True)]
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text")


class TokenizeAnswer(TypedDict):
    """The token ids the model would see."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(TypedDict):
    """The text."""

    prompt: str
