"""`GatewayEngine`: what gateways need of `Engine`, and of the engine of vectors, which has no attention worker."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future

from services.common.engine_thread import EngineThread
from services.dense_worker.engine.observer import CacheCounts, EngineCounts
from services.dense_worker.engine.sequence import Sequence


class GatewayEngine:
    """Call `start`, then the other public methods from any thread, where none of them blocks, finally `stop`.

    `failure` holds the error that ended the engine thread, if one did. The methods that this thread calls are those of
    the subclass.
    """

    def __init__(self) -> None:
        self._thread = EngineThread(self._work)
        self.failure = self._thread.failure
        self._drains = False  # starts no sequence

    @property
    def counts(self) -> EngineCounts:
        """The current counts."""
        raise NotImplementedError

    @property
    def caches(self) -> SequenceOf[CacheCounts]:
        """What each attention worker has."""
        return ()

    def spans_under_way(self) -> dict[int, range]:
        """The spans of tokens, by seq_id, that are being computed, or were when the last attachment ended."""
        return {}

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after its current step; blocks up to `timeout_s` seconds."""
        self._thread.stop(timeout_s)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence. If it is refused, its gateway gets an output with an error."""
        self._thread.post(self._add, sequence)

    def cancel(self, seq_id: int) -> None:
        """Forgets a sequence."""
        self._thread.post(self._cancel, seq_id)

    def close_orphans(self, gateway: int) -> None:
        """Closes all other sequences of a gateway that has submitted its sequences again."""

    def forget_prefixes(self, generation: int | None) -> Future[int]:
        """Sequences that are opened from now on find no blocks of earlier ones.

        With a `generation`, only if theirs was lower. The future gets theirs, or is cancelled if the engine ends.
        """
        done = Future[int]()
        done.set_result(generation or 0)
        return done

    def expect(self) -> None:
        """A sequence is about to come: if there is none yet, gets ready for it."""

    def drain(self, drains: bool) -> None:
        """Starts no sequence any more, or again; those that run go on."""
        self._thread.post(setattr, self, "_drains", drains)

    def leave(self) -> None:
        """Lets another dense worker take over after the running step, which is still reported."""
        self._thread.post(self._leave)

    def _work(self) -> float:
        """Runs between calls from outside. Returns how many seconds to wait for the next call."""
        raise NotImplementedError

    def _add(self, sequence: Sequence) -> None:
        raise NotImplementedError

    def _cancel(self, seq_id: int) -> None:
        raise NotImplementedError

    def _leave(self) -> None:
        raise NotImplementedError
