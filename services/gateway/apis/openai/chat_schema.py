"""POST /v1/chat/completions, as in OpenAI's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import pydantic
from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.common.config import MAX_PROMPTS
from services.gateway.apis.openai.answer_objects import AnswerObject, FinishReasonName, PromptLogprobs, UsageObject
from services.gateway.apis.openai.fields import OpenAIFields
from services.gateway.apis.openai.tool_schema import (
    AnswerToolCall,
    ToolCallDeltaObject,
    ToolCalls,
    ToolChoiceObject,
    ToolObjects,
)
from services.gateway.apis.shared.generation_fields import NamedFields, TemplateKwargs
from services.gateway.apis.shared.logprobs import ChatLogprobs
from services.gateway.apis.shared.parts import MAX_CHAT_PARTS, MAX_PARTS, by_field, readable
from services.gateway.apis.shared.request_model import CountOrAll, Int64, RequestModel, UInt32, at_most
from services.gateway.apis.shared.timings import ProgressObject, TimingsObject
from services.gateway.request.read_request import MAX_MESSAGES
from services.gateway.text.read_chat import MAX_NAME_CHARACTERS


class TextPart(RequestModel):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class EmbedsPart(RequestModel):
    """Vectors in a part of a message, as vLLM has them; only with gateway.enable_prompt_embeds."""

    type: Literal["prompt_embeds"]
    data: str = Field(description="A tensor [tokens, hidden] as torch.save writes it, in base64")


class ImageUrl(RequestModel):
    """Where a picture is."""

    url: str = Field(description="data:image/...;base64,... or, of hosts in gateway.image_hosts, https://...")
    detail: Literal["low", "high", "auto"] | None = Field(None, description="low: a smaller copy is enough")


class ImagePart(RequestModel):
    """A picture in a part of a message, for models that see pictures."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _as_part(value: Any) -> Any:
    """As vLLM reads a bare text, and a picture without a type. Refuses a picture that only its name stands for."""
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if not isinstance(value, dict):
        return value
    if "type" not in value and isinstance(value.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": value["image_url"]}}
    if value.get("type") == "image_url" and not value.get("image_url") and value.get("uuid") is not None:
        reason = "image_url is empty, but pictures are not kept by their uuid: send the picture again"
        raise PydanticCustomError("uuid", reason)
    return value


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextPart, Tag("<text>")]
                | Annotated[EmbedsPart, Tag("<prompt_embeds>")]
                | Annotated[ImagePart, Tag("<image_url>")],
                by_field("type", "text, image_url or prompt_embeds"),
                readable,
                pydantic.BeforeValidator(_as_part),
            ]
        ],
        Field(fail_fast=True),
        at_most(MAX_PARTS),
        Tag("<parts>"),
    ],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


AddGenerationPrompt = Annotated[
    bool | None,
    Field(description="End with the tokens that begin an answer; default: true, unless continue_final_message is"),
]
ContinueFinalMessage = Annotated[
    bool | None, Field(description="Leave the last message open, so that the answer continues it")
]


TemplateText = Annotated[
    str | None,
    Field(
        description="A Jinja template in place of the model's, at most 65536 bytes; only with "
        "gateway.trust_request_chat_template"
    ),
]


def _check_role(role: str) -> str:
    if role == "function":
        raise PydanticCustomError("role", "results of the older functions are not supported; use tools")
    return role


class ChatMessageObject(RequestModel):
    """One message of the chat."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": (),
        "refusal": (),
    }
    role: Annotated[str, pydantic.AfterValidator(_check_role)] = Field(
        min_length=1,
        max_length=MAX_NAME_CHARACTERS,
        description="system, developer (means system), user, assistant, tool, or another that the chat template knows",
    )
    content: Content | None = Field(None, description="May be null or missing for the assistant")
    name: str | None = Field(None, description="The speaker's name, for templates that use it")
    tool_calls: ToolCalls = Field(None, description="The assistant's calls of tools")
    tool_call_id: str | None = Field(None, description="For the role tool: the call that this message answers")
    reasoning: str | None = Field(None, description="The assistant's reasoning, for templates that use it")
    reasoning_content: str | None = Field(None, description="Another name of reasoning")

    @pydantic.model_validator(mode="after")
    def _check_content(self) -> ChatMessageObject:
        if self.role == "tool" and not self.tool_call_id:
            context = {"field": "tool_call_id"}
            raise PydanticCustomError("tool_call_id", "required for the role tool", context)
        if self.content is None and self.role != "assistant":
            context = {"field": "content", "role": self.role}
            raise PydanticCustomError("content", "required for the role {role}", context)
        return self

    @property
    def text(self) -> str:
        """All parts of text as one."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content if isinstance(part, TextPart)])

    @property
    def embeds(self) -> list[tuple[int, str]]:
        """The parts of vectors, each with the characters of `text` before it."""
        return [(position, part.data) for position, part in self._other_parts if isinstance(part, EmbedsPart)]

    @property
    def images(self) -> list[tuple[int, ImageUrl]]:
        """The pictures, each with the characters of `text` before it."""
        return [(position, part.image_url) for position, part in self._other_parts if isinstance(part, ImagePart)]

    @property
    def _other_parts(self) -> list[tuple[int, EmbedsPart | ImagePart]]:
        """The parts that are no text, each with the characters of `text` before it."""
        found, position = [], 0
        for part in self.content if isinstance(self.content, list) else ():
            if isinstance(part, TextPart):
                position += len(part.text)
            else:
                found.append((position, part))
        return found


def _check_parts(messages: Any) -> Any:
    """Counts the parts of all messages before any of them is checked."""
    if not isinstance(messages, list):
        return messages
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    count = sum(len(content) for content in contents if isinstance(content, list))
    if count > MAX_CHAT_PARTS:
        context = {"count": count, "most": MAX_CHAT_PARTS}
        raise PydanticCustomError("too_many", "the messages have {count} parts, at most {most} allowed", context)
    return messages


Messages = Annotated[
    list[ChatMessageObject],
    Field(min_length=1, fail_fast=True),
    pydantic.BeforeValidator(_check_parts),
    at_most(MAX_MESSAGES),
]


class ChatRequest(OpenAIFields, NamedFields):
    """The conversation so far, and the options of the answer."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAIFields.unsupported,
        # OpenAI
        "audio": (),
        "moderation": (),
        "function_call": ("none",),  # the older name of tool_choice
        "functions": ([],),  # the older name of tools
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
        # vLLM
        "documents": ([],),
        "ec_transfer_params": (),
        "kv_transfer_params": (),
        "return_prompt_text": (False,),
        "vllm_xargs": ({},),
        # fields of completions
        "prompt": (),
        "suffix": ("",),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "parse_tool_calls": (True,),  # llama.cpp's
    }

    messages: Messages
    tools: ToolObjects = None
    tool_choice: ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: an answer ends after its first call")
    reasoning_effort: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = Field(
        None, description="Variable of the chat template"
    )
    max_reasoning_tokens: UInt32 | None = Field(
        None, description="Longest reasoning in tokens; after that the model must end it. Default: no limit"
    )
    thinking_token_budget: CountOrAll | None = Field(
        None, description="Another name of max_reasoning_tokens, as in vLLM; -1: no limit"
    )
    separate_reasoning: bool | None = Field(
        None, description="false: leave the reasoning in the content, with its markers, as with SGLang"
    )
    reasoning_format: Literal["auto", "deepseek", "none"] | None = Field(
        None, description="llama.cpp's; none is separate_reasoning false, and auto and deepseek the default"
    )
    stream_reasoning: bool | None = Field(
        None, description="false: send the reasoning of a stream in one piece when it is whole, as with SGLang"
    )
    include_reasoning: bool | None = Field(None, description="false: leave the reasoning out of the answer")
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template: TemplateText = None
    chat_template_kwargs: TemplateKwargs = None
    max_completion_tokens: Int64 | None = Field(None, description="The newer name of max_tokens")
    echo: bool | None = Field(
        None, description="Start every answer with the text of the last message, if that is the assistant's"
    )
    logprobs: bool | None = Field(None, description="Give the log-probability of each token")
    return_prompt_token_ids: bool | None = Field(
        None, description="Give the prompt's token ids in each choice, as with SGLang; not of a stream"
    )
    return_progress: bool | None = Field(
        None, description="Send events with llama.cpp's prompt_progress while the prompt of a stream is computed"
    )
    top_logprobs: CountOrAll | None = Field(
        None,
        description="Most likely tokens to give for each token, up to gateway.max_logprobs; -1: the whole vocabulary. "
        "Those of all answers together are at most gateway.max_request_logprobs",
    )

    def without_messages(self) -> ChatRequest:
        """What is kept while the request waits and is answered: of all messages the text of the last one, and no tools.

        Thousands of messages are a hundred thousand objects, all of which each full collection of garbage looks at.
        """
        last = self.messages[-1]
        kept = ChatMessageObject.model_construct(role=last.role, content=last.text)
        return self.model_copy(update={"messages": [kept], "tools": None})

    @property
    def keeps_reasoning(self) -> bool:
        """Whether reasoning stays in the content."""
        return self.separate_reasoning is False or self.reasoning_format == "none"

    @property
    def has_progress(self) -> bool:
        """Whether events tell how far the prompt is computed."""
        return bool(self.return_progress and self.stream)

    @pydantic.model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            message = "top_logprobs is allowed only when logprobs is true"
            raise PydanticCustomError("top_logprobs", message, {"field": "top_logprobs"})
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "max_completion_tokens",
                "max_tokens is {old} and max_completion_tokens {new}: they mean the same",
                {"old": self.max_tokens, "new": self.max_completion_tokens, "field": "max_completion_tokens"},
            )
        if self.return_prompt_token_ids and self.stream:
            context = {"field": "return_prompt_token_ids"}
            raise PydanticCustomError("stream", "cannot be used with stream: return_token_ids can", context)
        budget = self.thinking_token_budget
        if None not in (budget, self.max_reasoning_tokens) and budget != self.max_reasoning_tokens:
            raise PydanticCustomError(
                "thinking_token_budget",
                "max_reasoning_tokens is {one} and thinking_token_budget {other}: they mean the same",
                {"one": self.max_reasoning_tokens, "other": budget, "field": "thinking_token_budget"},
            )
        return self


class BatchChatRequest(ChatRequest):
    """Several conversations, each of which gets one answer with the same options, as in vLLM."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ChatRequest.unsupported,
        "best_of": (1,),
        "echo": (False,),
        "n": (1,),
        "prompt_logprobs": (),
        "stream": (False,),
        "use_beam_search": (False,),
    }

    messages: Annotated[list[Messages], Field(min_length=1, fail_fast=True), at_most(MAX_PROMPTS)]  # type: ignore[assignment]

    @property
    def chats(self) -> list[ChatRequest]:
        """The same with one conversation each."""
        return [self.model_copy(update={"messages": each}) for each in self.messages]


class AnswerMessage(TypedDict):
    """The answer. `content` is null if there are only calls or reasoning; both reasoning fields are the same."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[AnswerToolCall]]
    reasoning: str | None
    reasoning_content: str | None


class Delta(TypedDict):
    """The new part of a streamed answer; the first one has the role. `reasoning` repeats `reasoning_content`."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDeltaObject]]
    reasoning: NotRequired[str]
    reasoning_content: str | None
    hidden_states: NotRequired[list[float] | None]  # at the end, with return_hidden_states


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: str | int | None
    matched_stop: str | int | None
    beam_score: NotRequired[float]  # with use_beam_search
    hidden_states: NotRequired[list[float] | None]  # with return_hidden_states
    token_ids: list[int] | None
    prompt_token_ids: NotRequired[list[int]]  # with return_prompt_token_ids
    timings: NotRequired[TimingsObject]  # where there are several


class ChunkChoice(TypedDict):
    """A piece of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: NotRequired[str | int | None]
    matched_stop: NotRequired[str | int | None]
    beam_score: NotRequired[float]  # with use_beam_search
    token_ids: NotRequired[list[int]]


class _ChatAnswer(AnswerObject):
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int] | None]


class ChatObject(_ChatAnswer):
    """The whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageObject


class ChatChunkObject(_ChatAnswer):
    """One event of a streamed answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[UsageObject | None]
    prompt_progress: NotRequired[ProgressObject]  # in events without text
