"""What a model with an encoder reads of a request, and what its decoder begins with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import ContextLengthExceeded, InvalidRequest, ModelError
from services.common.families.shape import EncoderConfig
from services.gateway.request.source_reader import SourceReader, make_source_reader
from services.pb import gateway_pb2, source_pb2

TEXT = EncoderConfig(1, 1, 8, 8, max_source_len=5, has_final_norm=True, vocab_size=90)
SOUND = EncoderConfig(1, 1, 8, 8, max_source_len=4, has_final_norm=True, num_mel_bins=2)


def decoder_prompt(reader: SourceReader, text: str = "", ids: list[int] | None = None) -> list[int]:
    async def encode(text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]

    message = gateway_pb2.GenerateRequest(decoder_prompt=text)
    if ids is not None:
        message.decoder_prompt_token_ids.ids.extend(ids)
    tokenizer: Any = SimpleNamespace(encode=encode)
    return asyncio.run(reader.read_decoder_prompt(message, tokenizer))


def test_equal_prompts_have_equal_hashes() -> None:
    reader = SourceReader(TEXT, 2, ())
    first, second, other = (reader.read_tokens(ids) for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 4]))
    assert first.ref == second.ref and first.ref.hash != other.ref.hash and first.ref.num_rows == 3
    assert list(source_pb2.Source.FromString(first.input).tokens.ids) == [1, 2, 3]


def test_the_decoder_begins_as_the_model_or_the_client_says() -> None:
    reader = SourceReader(TEXT, 2, (7,))
    assert decoder_prompt(reader) == [2, 7]
    assert decoder_prompt(reader, "5 6") == decoder_prompt(reader, ids=[5, 6]) == [2, 5, 6]
    assert decoder_prompt(reader, ids=[2, 5]) == [2, 5]
    assert decoder_prompt(SourceReader(SOUND, 2, ()), ids=[9, 8, 2, 5]) == [9, 8, 2, 5]  # earlier text comes first
    with pytest.raises(InvalidRequest, match="given as text and as token ids"):
        decoder_prompt(reader, "5", [5])


@pytest.mark.parametrize(
    ("token_ids", "error", "words"),
    [
        ([1] * 6, ContextLengthExceeded, "maximum context length is 5 tokens, but the encoder's prompt has 6"),
        ([1, 90], InvalidRequest, r"prompt\[1\] is 90, the encoder's vocabulary has 0 to 89"),
        ([-1], InvalidRequest, r"prompt\[0\] is -1"),
    ],
)
def test_a_prompt_that_the_encoder_cannot_read(token_ids: list[int], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        SourceReader(TEXT, 2, ()).read_tokens(token_ids)


def test_text_and_sound_are_not_mistaken_for_each_other() -> None:
    with pytest.raises(InvalidRequest, match="reads sound, not text"):
        SourceReader(SOUND, 2, ()).read_tokens([1])
    with pytest.raises(InvalidRequest, match="reads text, not sound"):
        SourceReader(TEXT, 2, ()).read_sound(source_pb2.Source(log_mel=bytes(64)))
    with pytest.raises(InvalidRequest, match="60 bytes, the encoder reads 64: 2 mel bins of 8 numbers"):
        SourceReader(SOUND, 2, ()).read_sound(source_pb2.Source(log_mel=bytes(60)))
    assert SourceReader(SOUND, 2, ()).read_sound(source_pb2.Source(log_mel=bytes(64))).ref.num_rows == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [({}, "has no decoder_start_token_id"), ({"decoder_start_token_id": 100}, "100, expected a token id below 100")],
)
def test_files_that_do_not_say_how_outputs_begin(tmp_path: Path, fields: dict[str, int], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config: Any = SimpleNamespace(encoder=TEXT, vocab_size=100)
    with pytest.raises(ModelError, match=words):
        make_source_reader(tmp_path, config)


def test_generation_config_comes_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"decoder_start_token_id": 3, "forced_bos_token_id": 4}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 5}))
    config: Any = SimpleNamespace(encoder=TEXT, vocab_size=100)
    halves = tmp_path / "halves"
    halves.mkdir()
    (halves / "config.json").write_text(json.dumps({"decoder": {"bos_token_id": 6}}))
    assert make_source_reader(halves, config).start_token_id == 6
    reader = make_source_reader(tmp_path, config)
    assert (reader.start_token_id, reader.forced_token_ids) == (5, (4,))
    assert make_source_reader(tmp_path, SimpleNamespace(encoder=None)) is None
