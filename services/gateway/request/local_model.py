"""`LocalModel`: what a gateway has of the served model: its files, and what reads prompts by them."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.images.picture_reader import PictureReader
from services.gateway.request.prompt_embeds_reader import PromptEmbedsReader
from services.gateway.request.source_reader import SourceReader
from services.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LocalModel:
    """There is one of a gateway."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    generates: bool = True  # False: it has no language head
    prompt_embeds: PromptEmbedsReader | None = None  # None: prompts of embeddings are refused
    sources: SourceReader | None = None  # None: it has no encoder
    pictures: PictureReader | None = None  # None: pictures are refused
