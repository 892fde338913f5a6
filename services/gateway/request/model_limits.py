"""The model that requests are for: its names, what a gateway has of it, and the limits of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.config import MAX_MODEL_NAME_CHARACTERS
from services.common.errors import InvalidRequest, UnknownModel
from services.gateway.images.picture_reader import PictureReader
from services.gateway.request.prompt_embeds_reader import PromptEmbedsReader
from services.gateway.request.sampling_defaults import SamplingDefaults
from services.gateway.request.source_reader import SourceReader
from services.gateway.text.tokenizer import Tokenizer
from services.lora.adapter import Adapter

# Hugging Face's clients send them to a server without knowing the model: Text Generation Inference takes any name.
PLACEHOLDERS = frozenset({"dummy", "tgi"})


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of the one model that is served, and of the adapters that a caller may name."""

    names: tuple[str, ...]  # at least one
    accepts_any: bool  # whether any other name also means this model
    root: str  # the model's directory, which /v1/models shows
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # by name

    @property
    def first(self) -> str:
        """The server's own name for the model."""
        return self.names[0]

    def check(self, name: str) -> None:
        """Accepts a name; empty means the first. Raises `UnknownModel`, or `InvalidRequest` if the name is too long."""
        if not name or name in self.names or name in self.adapters or name in PLACEHOLDERS:
            return
        if len(name) > MAX_MODEL_NAME_CHARACTERS:
            raise InvalidRequest(
                f"model has {len(name)} characters, at most {MAX_MODEL_NAME_CHARACTERS} allowed", "model"
            )
        if not self.accepts_any:
            raise UnknownModel(
                f"The model `{name}` does not exist: {name!r} is not served here, {self.first!r} is", "model"
            )


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What a gateway has of the served model: its files, and what reads prompts by them. There is one of a gateway."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    generates: bool = True  # False: it has no language head
    prompt_embeds: PromptEmbedsReader | None = None  # None: prompts of embeddings are refused
    sources: SourceReader | None = None  # None: it has no encoder
    pictures: PictureReader | None = None  # None: pictures are refused
    sampling_defaults: SamplingDefaults = field(default_factory=dict)  # of requests in OpenAI's APIs and those beside


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The model that a request is for, and the limits that it is checked against."""

    model: LocalModel
    names: ModelNames
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    max_prompts: int  # of one HTTP request
    max_n: int  # answers to one prompt
    max_logprobs: int  # likeliest tokens to tell of beside each output token
    max_beam_width: int  # beams of a search
    strict_max_tokens: bool = False  # whether max_tokens beyond the context is an error, else it is lowered
    queue_timeout_s: float | None = None  # longest wait at the dense worker for the first step

    @property
    def max_prompt_len(self) -> int:
        """Tokens of a prompt at most, and of its answer if both are read by the same layers."""
        sources = self.model.sources
        return self.max_model_len if sources is None or sources.reads_pictures else sources.encoder.max_source_len
