"""Opens a sequence: in a KV cache, or in an attention engine that has no thread and no tier."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from services.attn_worker.attachment import Attachment
from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.tiers.tier import BlockSupplier
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.openings import AnswerOpening
from services.step import NewSequence


def open_sequence(
    cache: KVCache,
    seq_id: int,
    token_ids: Iterable[int],
    num_prompt_tokens: int,
    prefix_key: bytes = b"",
    supplier: BlockSupplier | None = None,
    **options: Any,
) -> OpenResult:
    """`options`: further fields of `NewSequence`."""
    new = NewSequence(seq_id, f"r{seq_id}", tuple(token_ids), num_prompt_tokens, prefix_key, **options)
    return cache.open_sequence(new, supplier)


def open_now(engine: AttentionEngine, attachment: Attachment, new: NewSequence) -> OpenResult:
    """The result, which must be there at once."""
    opened: Future[OpenResult] = Future()
    engine.open_sequence(attachment, new, fulfilling(opened))
    return opened.result(0.0)


def fulfilling(opened: Future[OpenResult]) -> AnswerOpening:
    """An answer that gives the future the result, or the error, or cancels it."""

    def answer(result: OpenResult | Exception | None) -> None:
        if result is None:
            assert opened.cancel()
        elif isinstance(result, OpenResult):
            opened.set_result(result)
        else:
            opened.set_exception(result)

    return answer
