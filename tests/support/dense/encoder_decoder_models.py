"""Tiny random models with an encoder and a decoder, one of every family and some variants, and their truth."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    VisionEncoderDecoderModel,
)

VOCAB_SIZE, SOURCE_VOCAB_SIZE, NUM_MEL_BINS, MAX_SOURCE_LEN = 96, 80, 8, 20
FIRST_TOKEN = 5  # after those that mean something in some family

_BART = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "init_std": 0.3,
}
_T5 = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
# Grids of 15 x 10, 8 x 5 and 4 x 3 rows: windows of 3 are padded and shifted, in the last one neither along a side.
SWIN = {
    "model_type": "donut-swin",
    "image_size": [58, 40],
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 1, 2],
    "num_heads": [2, 2, 4],
    "window_size": 3,
    "mlp_ratio": 2.0,
}
NOUGAT_PROCESSOR = {
    "image_processor_type": "NougatImageProcessor",
    "size": {"height": 58, "width": 40},
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
_PAGES = {
    "encoder": SWIN,
    "decoder": _BART | {"model_type": "mbart", "scale_embedding": True, "tie_word_embeddings": False},
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
}
_WHISPER = {name: value for name, value in _BART.items() if name != "max_position_embeddings"}

# The model_type and the fields of config.json, by name of the variant.
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5),
    "t5-gated": ("t5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", _T5),
    "bart": ("bart", _BART),
    "mbart": ("mbart", _BART | {"scale_embedding": True, "decoder_start_token_id": 2}),
    "marian": (
        "marian",
        _BART | {"scale_embedding": True, "pad_token_id": VOCAB_SIZE - 1, "decoder_start_token_id": VOCAB_SIZE - 1},
    ),
    "fsmt": ("fsmt", _BART | {"src_vocab_size": SOURCE_VOCAB_SIZE, "tgt_vocab_size": VOCAB_SIZE}),
    "nougat": ("vision-encoder-decoder", _PAGES),
    "donut-tied": (
        "vision-encoder-decoder",
        _PAGES | {"decoder": {**_PAGES["decoder"], "tie_word_embeddings": True, "scale_embedding": False}},
    ),
    "whisper": (
        "whisper",
        _WHISPER
        | {
            "num_mel_bins": NUM_MEL_BINS,
            "max_source_positions": MAX_SOURCE_LEN,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
            "begin_suppress_tokens": None,
        },
    ),
}


def make_encoder_decoder(path: Path, variant: str, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random model with a tokenizer of words into `path`; returns `path`. Norms and biases are random, too."""
    family, fields = ENCODER_DECODERS[variant]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **copy.deepcopy(fields) | overrides)  # it takes inner ones apart
        if family == "vision-encoder-decoder":
            model = VisionEncoderDecoderModel(config)
        else:
            kind = AutoModelForSpeechSeq2Seq if family == "whisper" else AutoModelForSeq2SeqLM
            model = kind.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
            elif "relative_attention_bias" in name or "relative_position_bias" in name:
                torch.nn.init.normal_(parameter)
            elif "embed_positions" in name:
                if family not in ("marian", "fsmt"):  # which have them by a formula
                    parameter.data.normal_(std=0.5)
            elif "embed" not in name and "shared" not in name:
                parameter.data.mul_(2.0)  # else a tied head repeats the last token
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.2)
    model.save_pretrained(path)
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3").save_pretrained(path)
    return path


def load_true_encoder_decoder(path: Path) -> PreTrainedModel:
    """The model as transformers has it."""
    kinds = {"whisper": AutoModelForSpeechSeq2Seq, "vision-encoder-decoder": VisionEncoderDecoderModel}
    kind = kinds.get(AutoConfig.from_pretrained(path).model_type, AutoModelForSeq2SeqLM)
    return kind.from_pretrained(path).eval()


def random_source(truth: PreTrainedModel, length: int, seed: int) -> torch.Tensor:
    """What the encoder reads: `length` tokens, features of sound, or the numbers of a picture's pixels."""
    generator = torch.Generator().manual_seed(seed)
    if truth.main_input_name == "input_features":
        return torch.randn(NUM_MEL_BINS, 2 * MAX_SOURCE_LEN, generator=generator)
    if truth.main_input_name == "pixel_values":
        return torch.randn(3, *SWIN["image_size"], generator=generator)
    return torch.randint(FIRST_TOKEN, SOURCE_VOCAB_SIZE, (length,), generator=generator)


@torch.inference_mode()
def true_decoder_logits(truth: PreTrainedModel, source: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """The logits after each token of the decoder, [length, vocab_size], computed without any cache."""
    inputs = {truth.main_input_name: source[None]}
    return truth(**inputs, decoder_input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
