"""POST /v1/messages and /v1/messages/count_tokens, as in Anthropic's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from services.gateway.apis.anthropic.blocks import Messages, Texts
from services.gateway.apis.shared.generation_fields import IGNORED, Stream, TemplateKwargs, TopK
from services.gateway.apis.shared.other_servers import VLLM_MESSAGES
from services.gateway.apis.shared.parts import Description, ToolName
from services.gateway.apis.shared.request_model import Int64, RequestModel, UInt32, at_most
from services.gateway.request.read_request import MAX_STOP_STRINGS
from services.gateway.text.read_chat import MAX_NAME_CHARACTERS
from services.gateway.text.tools.tool import MAX_TOOLS

KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}  # an edit of the conversation that changes nothing
UNSUPPORTED_THREAD = "thread_unsupported_request"  # Anthropic's client then sends the whole conversation by itself


class ToolObject(RequestModel):
    """A tool that the client runs. Tools that Anthropic runs or defines have other types."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Description | None = None
    input_schema: dict[str, Any] = Field(description="JSON Schema of an object")
    strict: bool | None = None

    @pydantic.field_validator("input_schema")
    @classmethod
    def _check_type(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.get("type") != "object":
            raise PydanticCustomError("schema", "its type must be 'object'")
        return schema


class ToolChoiceObject(RequestModel):
    """auto: the model decides; any: at least one call; tool: a call of `name`; none: it sees no tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="true: an answer ends after its first call")

    @pydantic.model_validator(mode="after")
    def _check_name(self) -> ToolChoiceObject:
        if self.type == "tool" and not self.name:
            raise PydanticCustomError("name", "required for the type tool", {"field": "name"})
        return self


class ThinkingObject(RequestModel):
    """Whether the model reasons first, if its template lets the request decide."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: UInt32 | None = Field(None, description="Longest reasoning; for models that reason")


class OutputFormat(RequestModel):
    """How the answer's text is structured."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """Structure and effort of the answer."""

    effort: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = Field(
        None, description="Variable reasoning_effort of the chat template"
    )
    format: OutputFormat | None = None


class MetadataObject(RequestModel):
    """Who asks."""

    user_id: str | None = Field(None, description="For logs only, which show its first 128 characters")


def _refuse_thread(thread: Any) -> Any:
    if thread is not None:
        context = {"error_code": UNSUPPORTED_THREAD}
        raise PydanticCustomError("thread", "the server keeps no threads; send the whole conversation", context)
    return thread


class CountTokensRequest(RequestModel):
    """Everything that becomes the prompt."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **VLLM_MESSAGES,
        "compaction": (),
        "container": (),
        "context_management": ({}, {"edits": []}, {"edits": [KEEP_THINKING]}),
        "mcp_servers": ([],),
    }
    model: str
    messages: Messages
    system: Texts | None = None
    tools: Annotated[list[ToolObject] | None, Field(fail_fast=True), at_most(MAX_TOOLS)] = None
    tool_choice: ToolChoiceObject | None = None
    thinking: ThinkingObject | None = None
    chat_template_kwargs: TemplateKwargs = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format")
    thread: Annotated[Any, pydantic.AfterValidator(_refuse_thread)] = Field(
        None, description=f"Refused, with the error code {UNSUPPORTED_THREAD}: the server keeps no threads"
    )


class MessagesRequest(CountTokensRequest):
    """The conversation so far, and the options of the answer."""

    max_tokens: Annotated[Int64, Field(ge=1)] = Field(
        description="Lowered to the rest of the context, unless the server is strict"
    )
    stream: Stream = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK = None
    stop_sequences: Annotated[list[str] | None, at_most(MAX_STOP_STRINGS)] = Field(
        None, description="The answer ends before the first of these strings"
    )
    metadata: MetadataObject | None = None
    service_tier: str | None = Field(None, description=IGNORED)


class RenderedMessages(MessagesRequest):
    """A conversation of texts. Token ids alone cannot ask for what is made of the answer as it grows."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **MessagesRequest.unsupported,
        "tool_choice": ({"type": "auto"}, {"type": "none"}),
    }
