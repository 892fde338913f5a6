"""`PromptEmbeds`: vectors that stand in prompts in place of the embeddings of tokens.

They are the virtual tokens of prompt tuning (arXiv:2104.08691), or embeddings that a client has computed itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from services.common.errors import InvalidRequest
from services.common.shorten import show
from services.lora.safetensors_file import is_finite

# BF16 has no type in numpy; its bits are kept.
DTYPES: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """In a prompt with this table, token id vocab_size + i stands for row i. Equal hashes mean equal tables."""

    values: bytes  # row after row, little-endian
    num_rows: int
    hidden_size: int  # numbers in a row
    dtype: str  # a key of DTYPES
    hash: str  # of all above, hexadecimal

    def token_ids(self, vocab_size: int) -> range:
        """The token ids that stand for its rows."""
        return range(vocab_size, vocab_size + self.num_rows)


def make_prompt_embeds(values: bytes, num_rows: int, hidden_size: int, dtype: str, name: str) -> PromptEmbeds:
    """A table of values that may be anything; `name` is what the client calls them. Reads all: call it in a thread.

    Raises `InvalidRequest` if there are no rows, or the values are not as many as the rows need, or not finite.
    """
    if dtype not in DTYPES:
        raise InvalidRequest(f"{name} has dtype {show(dtype)}, supported: {', '.join(DTYPES)}", name)
    if not num_rows:
        raise InvalidRequest(f"{name} has no rows, at least 1 is required", name)
    num_bytes = num_rows * hidden_size * np.dtype(DTYPES[dtype]).itemsize
    if len(values) != num_bytes:
        raise InvalidRequest(
            f"{name} has {len(values)} bytes, {num_rows} rows of {hidden_size} {dtype} have {num_bytes}", name
        )
    if not is_finite(np.frombuffer(values, DTYPES[dtype])):
        raise InvalidRequest(f"{name} has values that are not finite", name)
    digest = hashlib.blake2b(f"{dtype} {num_rows} {hidden_size}\0".encode(), digest_size=32)
    digest.update(values)
    return PromptEmbeds(values, num_rows, hidden_size, dtype, digest.hexdigest())
