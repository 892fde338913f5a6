"""A tiny speech model with everything that its routes need, and files of sound."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.dense.encoder_decoder_models import make_encoder_decoder

RATE, WINDOW_S, NUM_STEPS = 16_000, 1, 50
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_TIMESTAMPS = range(50, 58)
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
VOCAB_SIZE = FIRST_TIMESTAMP + NUM_STEPS + 1
NUM_MEL_BINS = 8
ALIGNMENT_HEADS = [[0, 1], [1, 0], [1, 3]]
# The texts of the tokens below 50: words begin with a space, and some characters have several tokens.
PIECES = [
    *(f" {each}".encode() for each in "abcdefghijklmnopqrst"),
    *(each.encode() for each in "uvwxyzabcdefghi"),
    *(b".", b",", b" (", b")", b'"', b" ", b"-", b"!"),
    *(bytes([each]) for each in "é你".encode()),
    *(b"jk", b"lm"),
]


def make_speech_model(path: Path, seed: int = 0) -> Path:
    """Writes a Whisper with windows of a second into `path`; returns `path`. Tokens below 50 are `PIECES`.

    Its outputs end by themselves after some segments, as those of a model that was trained.
    """
    make_encoder_decoder(
        path,
        "whisper",
        seed,
        vocab_size=VOCAB_SIZE,
        max_source_positions=NUM_STEPS,
        max_target_positions=64,
        eos_token_id=END,
        bos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=START,
    )
    weights = load_file(path / "model.safetensors")
    row = weights["model.decoder.embed_tokens.weight"][END]  # zeros, as that of any padding
    row.copy_(0.3 * torch.randn(len(row), generator=torch.Generator().manual_seed(seed)))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    extractor = WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, sampling_rate=RATE, chunk_length=WINDOW_S)
    extractor.save_pretrained(path)
    byte_tokenizer(PIECES).save_pretrained(path)
    generation = {
        "decoder_start_token_id": START,
        "eos_token_id": END,
        "bos_token_id": END,
        "pad_token_id": END,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": PREVIOUS,
        "max_initial_timestamp_index": 20,
        "suppress_tokens": [7, 9, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS],
        "max_length": 64,
        "alignment_heads": ALIGNMENT_HEADS,
    }
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def byte_tokenizer(pieces: Iterable[bytes]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens stand for these bytes, in order."""
    letters = bytes_to_unicode()
    vocab = {"".join([letters[byte] for byte in piece]): index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def sound_of(seconds: float, seed: int = 0, rate: int = RATE, channels: int = 1) -> np.ndarray:
    """Noise whose loudness changes, float32 [num_samples, channels]."""
    rng = np.random.default_rng(seed)
    num_samples = round(seconds * rate)
    loudness = 0.1 + 0.3 * np.abs(np.sin(np.arange(num_samples) / rate * 7))
    return (loudness[:, None] * rng.standard_normal((num_samples, channels))).clip(-1, 1).astype(np.float32)


def sound_file(sound: np.ndarray, kind: str = "WAV", rate: int = RATE, subtype: str | None = None) -> bytes:
    """The sound as a file of a format that libsndfile knows."""
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=kind, subtype=subtype)
    return file.getvalue()
