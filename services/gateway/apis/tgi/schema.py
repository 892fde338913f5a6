"""The body of Text Generation Inference's POST /generate and /generate_stream, and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.gateway.apis.shared.request_model import Int32, RequestModel, UInt32, at_most
from services.gateway.apis.shared.structured_output import JsonSchema
from services.gateway.request.read_request import MAX_STOP_STRINGS

DEFAULT_TOKENS = 100  # Text Generation Inference's default of max_new_tokens

Count = Annotated[UInt32, Field(ge=1)]


class GrammarObject(RequestModel):
    """The form of the answer."""

    type: Literal["json", "json_schema", "regex"]
    value: JsonSchema = Field(description="A JSON Schema, or of json_schema an object with it as `schema`; or a regex")

    @pydantic.model_validator(mode="after")
    def _check_value(self) -> GrammarObject:
        if self.type == "regex" and not isinstance(self.value, str):
            raise PydanticCustomError("regex", "must be a text where type is regex", {"field": "value"})
        if self.type == "json_schema":
            schema = self.value.get("schema") if isinstance(self.value, dict) else None
            if not isinstance(schema, str | dict | bool):
                raise PydanticCustomError("schema", "must have a schema where type is json_schema", {"field": "value"})
        return self


class TgiParameters(RequestModel):
    """How the text goes on, and what is told of it. Null always means the default."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"typical_p": (1,), "watermark": (False,)}

    adapter_id: str | None = Field(None, description="The name of an adapter")
    best_of: Count | None = Field(None, description="Answers to generate; the most likely one is returned")
    decoder_input_details: bool | None = Field(
        None, description="Give the prompt's tokens with their log-probabilities; not of a stream"
    )
    details: bool | None = Field(None, description="Give the answer's tokens, and why it ended")
    do_sample: bool | None = Field(
        None, description="Draw tokens at random; by default only with a temperature other than 1, top_k or top_p"
    )
    frequency_penalty: float | None = None
    grammar: GrammarObject | None = None
    max_new_tokens: Count | None = Field(None, description=f"Longest answer in tokens; default {DEFAULT_TOKENS}")
    repetition_penalty: float | None = None
    return_full_text: bool | None = Field(None, description="Begin generated_text with the prompt")
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = None
    stop: Annotated[list[str] | None, at_most(MAX_STOP_STRINGS)] = Field(
        None, description="The answer ends behind the first of these strings, which it keeps"
    )
    temperature: float | None = None
    top_k: Int32 | None = None
    top_n_tokens: UInt32 | None = Field(None, description="Give this many most likely tokens at each position")
    top_p: float | None = None
    truncate: Count | None = Field(None, description="Keep only this many of the prompt's last tokens")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, and not always the most likely one."""
        return (
            bool(self.do_sample)
            or self.temperature not in (None, 0, 1)
            or bool(self.top_k)
            or self.top_p not in (None, 1)
        )


class TgiRequest(RequestModel):
    """A text to continue."""

    inputs: str
    parameters: TgiParameters = Field(default_factory=TgiParameters)
    stream: bool | None = Field(None, description="Send an event for each token")

    @pydantic.field_validator("parameters", mode="before")
    @classmethod
    def _no_parameters(cls, value: Any) -> Any:
        return {} if value is None else value

    @pydantic.model_validator(mode="after")
    def _check_stream(self) -> TgiRequest:
        if self.is_stream:
            for field, given in (
                ("parameters.decoder_input_details", self.parameters.decoder_input_details),
                ("parameters.best_of", (self.parameters.best_of or 1) > 1),
            ):
                if given:
                    raise PydanticCustomError("stream", "cannot be used with stream", {"field": field})
        return self

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.stream)


class StreamRequest(TgiRequest):
    """A text to continue in a stream."""

    @property
    def is_stream(self) -> bool:
        """It always is."""
        return True


class PromptTokenObject(TypedDict):
    """A token of the prompt; the first one has no log-probability."""

    id: int
    text: str
    logprob: float | None


class TgiToken(TypedDict):
    """A token of the answer, and the text that it adds."""

    id: int
    text: str
    logprob: float
    special: bool


class TgiSequence(TypedDict):
    """One answer of `best_of`."""

    generated_text: NotRequired[str]  # of the others than the best one
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None  # null if the most likely tokens were taken
    prefill: list[PromptTokenObject]
    tokens: list[TgiToken]
    top_tokens: NotRequired[list[list[TgiToken]]]


class TgiDetails(TgiSequence):
    """How the answer came about."""

    best_of_sequences: NotRequired[list[TgiSequence]]


class TgiAnswer(TypedDict):
    """The answer."""

    generated_text: str
    details: NotRequired[TgiDetails]


class StreamDetails(TypedDict):
    """How a streamed answer ended."""

    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiEvent(TypedDict):
    """A token of a stream. The last one comes with the whole text."""

    index: int
    token: TgiToken
    top_tokens: NotRequired[list[TgiToken]]
    generated_text: str | None
    details: StreamDetails | None


class TextServerInfo(TypedDict):
    """The served model and the limits of requests."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    router: str
    version: str
