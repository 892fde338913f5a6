"""Opens a sequence in an attention engine that has no thread and no tier."""

from __future__ import annotations

from concurrent.futures import Future

from services.attn_worker.attachment import Attachment
from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.engine import AttentionEngine
from services.step import NewSequence


def open_now(engine: AttentionEngine, attachment: Attachment, new: NewSequence) -> OpenResult:
    """The result, which must be there at once."""
    opened: Future[OpenResult] = Future()
    engine.open_sequence(attachment, new, opened)
    return opened.result(0.0)
