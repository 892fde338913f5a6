"""Requests to a model with an encoder: it reads the prompt, and the decoder begins with other tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import InvalidRequest, ModelError
from services.common.families.shape import EncoderConfig
from services.common.json_files.read_json import read_json
from services.common.model_config import ModelConfig
from services.gateway.images.picture import Picture
from services.gateway.request.context_length import too_long
from services.gateway.text.tokenizer import Tokenizer
from services.pb import gateway_pb2, source_pb2
from services.step.sequence_spec import SourceRef


@dataclass(frozen=True, slots=True)
class Source:
    """What is asked for of the encoder."""

    ref: SourceRef
    input: bytes  # the message of the feature `source`

    @classmethod
    def of(cls, message: source_pb2.Source, num_rows: int) -> Source:
        """The source of a message that is right."""
        data = message.SerializeToString(deterministic=True)
        return cls(SourceRef(hashlib.blake2b(data, digest_size=32).hexdigest(), num_rows), data)


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Knows what the encoder can read, and what the decoder begins with."""

    encoder: EncoderConfig
    start_token_id: int  # what all outputs begin with
    forced_token_ids: tuple[int, ...]  # that follow it where a client names no others

    @property
    def reads_sound(self) -> bool:
        """Whether the encoder reads sound, and no tokens."""
        return self.encoder.num_mel_bins > 0

    @property
    def reads_pictures(self) -> bool:
        """Whether the encoder reads a picture, and no tokens."""
        return self.encoder.swin is not None

    def read_tokens(self, token_ids: Sequence[int], pictures: Sequence[Picture] = ()) -> Source:
        """The source of a prompt, with the pictures that its tokens stand for.

        Raises `InvalidRequest` for what the encoder cannot read.
        """
        encoder = self.encoder
        if self.reads_sound:
            raise InvalidRequest(
                "the model reads sound, not text: /v1/audio/transcriptions and /v1/audio/translations take it", "prompt"
            )
        if len(token_ids) > encoder.max_source_len:
            raise too_long(encoder.max_source_len, f"the encoder's prompt has {len(token_ids)}", "prompt")
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < encoder.vocab_size:
                last = encoder.vocab_size - 1
                raise InvalidRequest(
                    f"prompt[{index}] is {token_id}, the encoder's vocabulary has 0 to {last}", "prompt"
                )
        hashes = [bytes.fromhex(each.hash) for each in pictures]
        tokens = source_pb2.SourceTokens(ids=token_ids, pictures=hashes)
        return Source.of(source_pb2.Source(tokens=tokens), len(token_ids))

    def read_sound(self, message: source_pb2.Source) -> Source:
        """The source of the features of sound. Raises `InvalidRequest` for features of another shape."""
        encoder = self.encoder
        num_bytes = 4 * encoder.num_mel_bins * 2 * encoder.max_source_len
        if not self.reads_sound:
            raise InvalidRequest("the model reads text, not sound", "sound")
        if len(message.log_mel) != num_bytes:
            raise InvalidRequest(
                f"the features have {len(message.log_mel)} bytes, the encoder reads {num_bytes}:"
                f" {encoder.num_mel_bins} mel bins of {2 * encoder.max_source_len} numbers in float32",
                "sound",
            )
        return Source.of(message, encoder.max_source_len)

    def read_picture(self, pictures: Sequence[Picture]) -> Source:
        """The source of a request's pictures. Raises `InvalidRequest` unless it is one."""
        if len(pictures) != 1:
            raise InvalidRequest(f"the request has {len(pictures)} pictures, the model reads one", "messages")
        message = source_pb2.Source(picture=bytes.fromhex(pictures[0].hash))
        return Source.of(message, self.encoder.max_source_len)

    async def read_text_beside(self, message: gateway_pb2.GenerateRequest, tokenizer: Tokenizer) -> list[int]:
        """What the decoder begins with beside a picture: the client's text with its special tokens, such as those of
        Donut's tasks, as it is; without one the first token. Raises `InvalidRequest` for more than a text.
        """
        chat, kind = message.chat, message.WhichOneof("input")
        if kind == "chat" and (len(chat.messages) != 1 or chat.messages[0].role != "user" or chat.tools):
            raise InvalidRequest("a chat with this model is one message of the user, without tools", "messages")
        given = list(message.prompt_token_ids.ids)
        if text := chat.messages[0].content if kind == "chat" else message.prompt:
            given = await tokenizer.encode(text, False)
        has_ids = message.HasField("decoder_prompt_token_ids")
        if not has_ids and not message.decoder_prompt:
            return given or [self.start_token_id]
        if given:
            raise InvalidRequest("the decoder's prompt is given beside the picture, and in decoder_prompt", "messages")
        return await self.read_decoder_prompt(message, tokenizer)

    async def read_decoder_prompt(self, message: gateway_pb2.GenerateRequest, tokenizer: Tokenizer) -> list[int]:
        """What the decoder begins with. Raises `InvalidRequest` if two things are given."""
        has_ids, text = message.HasField("decoder_prompt_token_ids"), message.decoder_prompt
        if has_ids and text:
            raise InvalidRequest("decoder_prompt is given as text and as token ids", "decoder_prompt")
        if not has_ids and not text:
            return [self.start_token_id, *self.forced_token_ids]
        given = list(message.decoder_prompt_token_ids.ids) if has_ids else await tokenizer.encode(text, False)
        if self.reads_pictures:  # and knows tasks by what is in place of the first token
            return given
        has_start = self.start_token_id in (given if self.reads_sound else given[:1])  # earlier text may be before it
        return given if has_start else [self.start_token_id, *given]


def make_source_reader(path: Path, config: ModelConfig) -> SourceReader | None:
    """The reader of a model in `path`; None if it has no encoder.

    Raises ModelError if its files do not say what the decoder begins with.
    """
    if config.encoder is None:
        return None
    files = [read_json(path / name) or {} for name in ("generation_config.json", "config.json")]
    files.append(files[-1].get("decoder") or {})  # of a model whose halves have configs of their own

    def find(name: str) -> int | None:
        value = next((each[name] for each in files if each.get(name) is not None), None)
        if value is not None and (type(value) is not int or not 0 <= value < config.vocab_size):
            raise ModelError(f"{path} has {name} {value!r}, expected a token id below {config.vocab_size}")
        return value

    start = find("decoder_start_token_id")
    if start is None:
        start = find("bos_token_id")
    if start is None:
        raise ModelError(f"{path} has no decoder_start_token_id, with which a decoder begins")
    forced = find("forced_bos_token_id")
    return SourceReader(config.encoder, start, () if forced is None else (forced,))
