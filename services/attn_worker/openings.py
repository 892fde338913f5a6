"""`Openings`: opens sequences in the KV cache. Those whose blocks come from elsewhere are answered when they are there.

They come from a tier or, when a sequence moves, from the attention worker that it leaves.

For the engine thread alone. A sequence that waits holds its blocks, which the scheduler has reserved for it, and nobody
runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import structlog

from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.tiers.tier import BlockSupplier
from services.attn_worker.moved_blocks import BlockReceiver
from services.attn_worker.runner.layer_runner import LayerRunner
from services.step import NewSequence

log = structlog.get_logger()

# Gets the result of an opening, or what went wrong later than the call; None: the attachment has ended before.
AnswerOpening: TypeAlias = Callable[[OpenResult | Exception | None], None]


@dataclass(slots=True, eq=False)
class _Opening:
    new: NewSequence
    answer: AnswerOpening
    num_freed_blocks: int = 0  # by all attempts
    num_copied_blocks: int = 0  # from another attention worker, by all attempts
    result: OpenResult | None = None  # of the last attempt
    followers: list[_Opening] = field(default_factory=list)  # sequences that want some of the same blocks
    is_answered: bool = False


class Openings:
    """`submit` makes a call on the engine thread, and `note_opened` gets each result that is answered."""

    def __init__(
        self,
        cache: KVCache,
        runner: LayerRunner,
        submit: Callable[..., Future[None]],
        note_opened: Callable[[OpenResult], None],
        receiver: BlockReceiver | None = None,
    ) -> None:
        """`receiver`: for blocks of other attention workers; None: what moves is computed again."""
        self._cache = cache
        self._runner = runner
        self._submit = submit
        self._note_opened = note_opened
        self._receiver = receiver
        self._loading: dict[bytes, _Opening] = {}  # by the digests of the blocks that are being loaded

    def open(self, new: NewSequence, answer: AnswerOpening) -> None:
        """Opens a sequence. `answer` gets the result, now or when its blocks are there.

        Raises InvalidRequest for impossible lengths.
        """
        if new.part is None:
            self._open(_Opening(new, answer))
        else:
            self._answer(_Opening(new, answer), self._cache.open_part(new.seq_id, new.part))

    def cancel_all(self) -> None:
        """Forgets all sequences that wait. Returns when nothing writes to their blocks any more."""
        if not self._loading:
            return
        self._cache.tier.cancel_loads()
        if self._receiver is not None:
            self._receiver.cancel_loads()
        openings, self._loading = dict.fromkeys(self._loading.values()), {}
        for opening in openings:
            self._cache.close_sequences([opening.new.seq_id])
            for each in (opening, *opening.followers):
                each.answer(None)

    def _open(self, opening: _Opening) -> None:
        new, supplier = opening.new, self._supplier(opening.new)
        opening.result = result = self._cache.open_sequence(new, supplier)
        opening.num_freed_blocks += result.num_freed_blocks
        if not result.missing:
            self._answer(opening, result)
            return
        other = next((self._loading[digest] for digest, _ in result.missing if digest in self._loading), None)
        if other is not None:
            self._cache.close_sequences([new.seq_id])
            other.followers.append(opening)
            return
        self._loading |= dict.fromkeys((digest for digest, _ in result.missing), opening)
        finish = partial(self._submit, self._finish, opening, result)  # the tier's thread calls it
        supplier.load(result.missing, self._runner.fence(), finish)

    def _supplier(self, new: NewSequence) -> BlockSupplier:
        """Where blocks that are missing come from."""
        if not new.leaves_address:
            return self._cache.tier
        if self._receiver is not None:
            return self._receiver.supplier_at(new.leaves_address)
        reason = "the KV cache has windows or states beside blocks, or no prefix cache"
        log.info("a sequence that moves is computed again", seq_id=f"{new.seq_id:x}", reason=reason)
        return self._cache.tier

    def _finish(self, opening: _Opening, result: OpenResult, num_loaded: int) -> None:
        """So many of the first missing blocks are there. An error goes to `answer`."""
        if self._loading.get(result.missing[0][0]) is not opening or opening.result is not result:
            return  # cancelled
        try:
            self._go_on(opening, result, num_loaded)
        except Exception as error:
            if opening.is_answered:
                raise
            opening.answer(error)

    def _go_on(self, opening: _Opening, result: OpenResult, num_loaded: int) -> None:
        for digest, _ in result.missing:
            del self._loading[digest]
        self._cache.register_loaded(result.missing[:num_loaded])
        if opening.new.leaves_address:
            opening.num_copied_blocks += num_loaded
            opening.new = replace(opening.new, leaves_address="")  # it has no more of them
        if num_loaded == len(result.missing):
            self._answer(opening, result)
        else:  # it will not be offered the next block again, so that this ends
            self._cache.close_sequences([opening.new.seq_id])
            self._open(opening)
        followers, opening.followers = opening.followers, []
        for follower in followers:
            self._open(follower)

    def _answer(self, opening: _Opening, result: OpenResult) -> None:
        num_freed, num_copied = opening.num_freed_blocks, opening.num_copied_blocks
        if num_freed != result.num_freed_blocks or num_copied:
            result = replace(result, num_freed_blocks=num_freed, num_copied_blocks=num_copied)
        self._note_opened(result)
        opening.is_answered = True
        opening.answer(result)
        log.debug("opened", request_id=opening.new.request_id, num_cached_tokens=result.num_cached_tokens)
