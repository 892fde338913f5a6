"""`PictureReader`: the pictures of a request, decoded. Used in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

from services.common.config import GatewaySection
from services.common.errors import ConfigError, InvalidRequest
from services.common.fairness import Client
from services.common.vision.vision_config import FAMILIES, VisionConfig
from services.gateway.images.decoder import MAX_AT_ONCE, Decoder, Encoding
from services.gateway.images.picture import Picture, expand
from services.gateway.images.sources import PictureSources
from services.gateway.resources.memory_budget import HeldMemory
from services.gateway.text.picture_text import PictureText
from services.gateway.text.tokenizer import Tokenizer
from services.pb import gateway_pb2
from services.step.prompt_span import PromptSpan

Request: TypeAlias = gateway_pb2.GenerateRequest | gateway_pb2.TokenizeRequest

DETAILS = ("", "auto", "low", "high")
# Of text in a request, whose body has room for more because of its pictures. To tokenize one takes 140 bytes. It is an
# eighth of a body, as large as bodies are by default, and grows with them.
MIN_MAX_CHARACTERS = 2 * 2**20


class PictureReader:
    """`close` ends its processes."""

    def __init__(self, vision: VisionConfig, section: GatewaySection, tokenizer: Tokenizer) -> None:
        """Raises `ConfigError` if the tokenizer lacks a token that the model has for pictures."""
        self._vision = vision
        self._section = section
        self._max_characters = max(MIN_MAX_CHARACTERS, (section.max_body_bytes or 0) // 8)
        self._sources = PictureSources(section)
        self._decoder = Decoder(vision.layout, section.max_image_pixels, section.image_cache_bytes)
        self._token, self._ids = "", dict[str, int]()
        if vision.tower is not None:
            self._token = picture_token(vision, tokenizer)
            self._ids = {name: _token_id(name, tokenizer) for name in (self._token, *vision.layout.other_tokens)}

    @property
    def have_tokens(self) -> bool:
        """Whether tokens of a prompt stand for pictures; else an encoder reads them."""
        return self._vision.tower is not None

    def check_text(self, num_characters: int, field: str) -> None:
        """Raises `InvalidRequest` for more text than models have whose requests have no room for pictures."""
        if num_characters > self._max_characters:
            raise InvalidRequest(
                f"{field} has {num_characters} characters of text, at most {self._max_characters} beside pictures (an "
                f"eighth of gateway.max_body_bytes, at least {MIN_MAX_CHARACTERS})",
                field,
            )

    def check_count(self, count: int) -> None:
        """Raises `InvalidRequest` for more pictures than a request may have."""
        if count > self._section.max_images:
            raise InvalidRequest(
                f"the request has {count} pictures, gateway.max_images is {self._section.max_images}", "messages"
            )

    @asynccontextmanager
    async def reading(
        self, message: Request, client: Client, held: HeldMemory, *, worker_resizes: bool = False
    ) -> AsyncIterator[Awaitable[list[Picture]]]:
        """Decodes a message's pictures, whose bytes it takes out of it, a few beside each other: the last ones within
        the context.

        What is given there waits for all. Reserves the memory for their pixels; equal files are decoded once.
        worker_resizes: the dense worker does it faster than Pillow.
        Raises `InvalidRequest` for a picture that cannot be read.
        """
        tasks: list[asyncio.Task[Picture]] = []
        waiting = asyncio.Lock()
        found = dict[tuple[bytes, bool], asyncio.Task[Picture]]()
        all_tasks: asyncio.Future[list[Picture]] | None = None
        try:
            for each in _pictures_of(message):
                if len(found) >= MAX_AT_ONCE:
                    await list(found.values())[-MAX_AT_ONCE]
                encoded = await self._take(each, worker_resizes)
                key = encoded.file.hash, encoded.is_low
                if key not in found:
                    found[key] = asyncio.create_task(self._decoder.decode(encoded, client, held, waiting))
                tasks.append(found[key])
            await asyncio.sleep(0)  # they begin now: what is within may keep the event loop busy for some milliseconds
            all_tasks = asyncio.gather(*tasks)
            yield all_tasks
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        finally:  # also if the text is refused: to cancel them would end the processes that decode
            await asyncio.gather(*tasks, *([all_tasks] if all_tasks else []), return_exceptions=True)

    async def _take(self, picture: gateway_pb2.MessagePicture, worker_resizes: bool) -> Encoding:
        """The bytes of a picture, which its message has no more."""
        if picture.detail not in DETAILS:
            raise InvalidRequest(f"detail is {picture.detail!r}, must be low, high or auto", "messages")
        file = await self._sources.read(picture)
        picture.ClearField("data")
        picture.ClearField("url")
        return Encoding(file, picture.detail == "low", worker_resizes)

    def expand(self, token_ids: list[int], pictures: Sequence[Picture]) -> tuple[list[int], tuple[PromptSpan, ...]]:
        """A prompt with all tokens of its pictures, and their spans. Raises `InvalidRequest` if places are missing.

        Pictures that an encoder reads have no tokens.
        """
        if not self.have_tokens:
            return token_ids, ()
        return expand(token_ids, pictures, self._vision.layout, self._ids, self._token)

    async def close(self) -> None:
        """Ends the processes that decode."""
        await self._decoder.close()


def _pictures_of(message: Request) -> Iterator[gateway_pb2.MessagePicture]:
    """All pictures of a message, in order."""
    yield from message.pictures
    for each in message.chat.messages:
        yield from each.pictures


def picture_token(vision: VisionConfig, tokenizer: Tokenizer) -> str:
    """The name of the token that stands for pictures. Raises `ConfigError` if there is none."""
    [name] = tokenizer.tokens([vision.image_token_id])
    if not name:
        raise ConfigError(
            f"the tokenizer has no token {vision.image_token_id}, which stands for pictures: set model.images to false"
        )
    return name


def picture_text(vision: VisionConfig, tokenizer: Tokenizer) -> PictureText:
    """What chat templates write for a picture, and what is tokenized for it."""
    token, layout, family = picture_token(vision, tokenizer), vision.layout, FAMILIES[vision.family]
    return PictureText(
        layout.marker or token,
        layout.text.format(token) if layout.text else token,
        family.chat_template.replace("<picture>", token),
        family.precedes_text,
    )


def _token_id(name: str, tokenizer: Tokenizer) -> int:
    token_id = tokenizer.token_id(name)
    if token_id is None:
        raise ConfigError(f"the tokenizer has no token {name!r}, which pictures need: set model.images to false")
    return token_id
