"""POST /tokenize and /detokenize, as in vLLM, llama.cpp and Hugging Face's servers, and llama.cpp's /apply-template."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

import pydantic
from pydantic import Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.common.config import MAX_PROMPTS
from services.gateway.apis.openai.chat_schema import (
    AddGenerationPrompt,
    ContinueFinalMessage,
    Messages,
    TemplateText,
)
from services.gateway.apis.openai.tool_schema import ToolChoiceObject, ToolObjects
from services.gateway.apis.shared.generation_fields import TemplateKwargs
from services.gateway.apis.shared.parts import by_shape
from services.gateway.apis.shared.request_model import RequestModel, TokenLists, at_most

Texts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("<texts>")],
    by_shape(),
]


class TokenizeBody(RequestModel):
    """Exactly one of: a text, a list of texts, a chat. `content` and the fields after it are llama.cpp's."""

    model: str | None = None
    prompt: Texts | None = Field(None, description="A text, or a list of them")
    messages: Messages | None = None
    tools: ToolObjects = None
    tool_choice: ToolChoiceObject | None = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template: TemplateText = None
    chat_template_kwargs: TemplateKwargs = None
    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens expected around a prompt; default: true for a text, false for a chat"
    )
    return_token_strs: bool | None = Field(None, description="Give each token as the tokenizer writes it")
    inputs: Texts | None = Field(
        None,
        description="A text, or a list of them; the answer is a list of objects for each, as of Text Embeddings "
        "Inference, or for one text a list of them, as of Text Generation Inference if the model makes no vectors",
    )
    prompt_name: str | None = Field(
        None, description="For inputs: the name of one of the model's prompts, which precedes each text"
    )
    content: str | None = Field(None, description="A text, by default without special tokens around it")
    add_special: bool | None = Field(None, description="For content: another name of add_special_tokens")
    parse_special: bool | None = Field(
        None, description="For content: false: special tokens that are written out in it are plain text"
    )
    with_pieces: bool | None = Field(None, description="For content: give each token with its id and text")

    @pydantic.model_validator(mode="after")
    def _check_input(self) -> TokenizeBody:
        if (self.prompt, self.messages, self.content, self.inputs).count(None) != 3:
            message = "exactly one of prompt, messages, content and inputs is required"
            raise PydanticCustomError("input", message, {"field": "prompt"})
        if self.prompt_name is not None and self.inputs is None:
            raise PydanticCustomError("name", "has an effect only with inputs", {"field": "prompt_name"})
        return self


class DetokenizeBody(RequestModel):
    """The token ids of one text or of several."""

    model: str | None = None
    tokens: TokenLists = Field(description="Token ids, or a list of lists of them")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text")


class TemplateBody(RequestModel):
    """A chat, and the options of its template."""

    model: str | None = None
    messages: Messages
    tools: ToolObjects = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template: TemplateText = None
    chat_template_kwargs: TemplateKwargs = None


class TemplateAnswer(TypedDict):
    """The text that the chat template makes of the chat."""

    prompt: str


class ChatTokens(TypedDict):
    """The number of tokens of a chat's prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenPiece(TypedDict):
    """A token and its text; where that is no whole character, its bytes."""

    id: int
    piece: str | list[int]


class PlacedToken(TypedDict):
    """A token of one of `inputs`, and the first character of its text in that input and the one behind the last.

    Both are null for special tokens around the text.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokenizeAnswer(TypedDict):
    """The token ids that the model would see; for a list of texts, a list for each text."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]] | list[TokenPiece]
    token_strs: list[str] | list[list[str]] | None


class DetokenizeAnswer(TypedDict):
    """The text; for several lists, a list of texts. `text` is SGLang's name of it, `content` llama.cpp's.

    llama.cpp's requests name no model, so the answer to one that does has no `content`.
    """

    prompt: str | list[str]
    text: str | list[str]
    content: NotRequired[str | list[str]]


class AddedTokenObject(TypedDict):
    """A token that the tokenizer searches for before it splits a text."""

    content: str
    lstrip: bool
    normalized: bool
    rstrip: bool
    single_word: bool
    special: bool


class TokenizerInfo(TypedDict):
    """As in tokenizer_config.json, with further fields: the special tokens by name, and the tokenizer's settings."""

    tokenizer_class: str
    chat_template: str | dict[str, str] | None
    added_tokens_decoder: dict[str, AddedTokenObject]
