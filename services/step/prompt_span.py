"""`PromptSpan`: tokens of a prompt that stand for something else than themselves, such as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from services.common.errors import InvalidRequest
from services.pb import prompt_span_pb2


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Tokens `[start, end)` of a prompt. Prefixes are only shared if the spans within them have equal hashes."""

    start: int
    num_tokens: int  # at least 1
    hash: str  # of what they stand for, hexadecimal
    grid_rows: int = 0  # of the grid in which they lie; 0: in none, and they have positions as text has
    grid_columns: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_positions(self) -> int:
        """How far the text after it is behind its first token, for rotary embeddings."""
        return max(self.grid_rows, self.grid_columns) or self.num_tokens


def check_spans(spans: Sequence[PromptSpan], num_prompt_tokens: int) -> None:
    """Raises `InvalidRequest` unless spans lie in the prompt, in order, without overlap, and grids fill them."""
    end = 0
    for span in spans:
        has_wrong_grid = (span.grid_rows, span.grid_columns) != (0, 0) and (
            span.grid_rows * span.grid_columns != span.num_tokens
        )
        if span.start < end or span.num_tokens < 1 or span.end > num_prompt_tokens or has_wrong_grid:
            raise InvalidRequest(
                f"a span has tokens {span.start} to {span.end} in {span.grid_rows} rows of {span.grid_columns}; "
                f"the one before ends at {end}, and the prompt has {num_prompt_tokens}"
            )
        end = span.end


def rope_positions(spans: Sequence[PromptSpan]) -> tuple[np.ndarray, int]:
    """The positions of tokens for rotary embeddings with three axes: time, row and column of a picture.

    As in Qwen2-VL (arXiv:2409.12191, section 2.1): text has the same number on all axes; a token of a grid has the
    number of the grid's begin, plus its row, and plus its column; text goes on behind the greatest of these.

    Returns int32 [3, end of the last span], and what the tokens after it have to add to their index.
    """
    pieces, position, end = list[np.ndarray](), 0, 0
    for span in spans:
        text = np.arange(span.start - end) + position
        position += len(text)
        pieces.append(np.broadcast_to(text, (3, len(text))))
        if span.grid_rows:
            rows, columns = np.divmod(np.arange(span.num_tokens), span.grid_columns)
            pieces.append(np.stack((np.zeros_like(rows), rows, columns)) + position)
        else:
            pieces.append(np.broadcast_to(np.arange(span.num_tokens) + position, (3, span.num_tokens)))
        position, end = position + span.num_positions, span.end
    return np.concatenate(pieces, axis=1).astype(np.int32), position - end


def encode_spans(spans: Iterable[PromptSpan]) -> list[prompt_span_pb2.PromptSpan]:
    """The messages."""
    return [
        prompt_span_pb2.PromptSpan(
            start=span.start,
            num_tokens=span.num_tokens,
            hash=bytes.fromhex(span.hash),
            grid_rows=span.grid_rows,
            grid_columns=span.grid_columns,
        )
        for span in spans
    ]


def decode_spans(messages: Iterable[prompt_span_pb2.PromptSpan]) -> tuple[PromptSpan, ...]:
    """The spans of messages, which the gateway has made."""
    return tuple(
        PromptSpan(each.start, each.num_tokens, each.hash.hex(), each.grid_rows, each.grid_columns) for each in messages
    )
