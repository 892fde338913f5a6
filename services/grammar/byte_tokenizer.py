"""The tokenizer of models that have none: one token per byte of UTF-8."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer() -> Tokenizer:
    """For models with dummy weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
