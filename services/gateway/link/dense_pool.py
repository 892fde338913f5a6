"""Several streams to dense workers that serve the same model: to one worker, or to replicas behind one name.

gRPC resolves the name, watches the replicas' health and takes turns among the healthy ones; here it is only
decided which stream runs which sequence. When a worker dies, its sequences alone move, to any other stream.
Runs in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial

import grpc
import structlog

from services.common.config import PeerSection
from services.common.errors import PeerError, RequestAborted
from services.gateway.link.dense_client import DenseClient, ServedModel
from services.gateway.link.journal import Journal, JournalEntry
from services.pb import stall_pb2
from services.rpc.client import is_balanced, open_channel, read_peer_tls
from services.rpc.server import run_together
from services.rpc.watchdog import describe_stall

log = structlog.get_logger()

REBALANCE_INTERVAL_S = 5.0


class Share:
    """The part of the journal that one stream runs; to its `DenseClient` it is the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._entries: dict[int, JournalEntry] = {}
        self.get = self._entries.get  # see `Journal.get`; asked for every token
        self.client: DenseClient

    def add(self, entry: JournalEntry) -> None:
        """Takes an entry over from whoever had it."""
        if entry.share is not None:
            entry.share.discard(entry)
        entry.share = self
        self._entries[entry.seq_id] = entry

    def discard(self, entry: JournalEntry) -> None:
        """Lets go of an entry, if it is here."""
        self._entries.pop(entry.seq_id, None)

    @property
    def instance(self) -> int:
        """See `Journal.instance`."""
        return self._journal.instance

    def unfinished(self) -> Iterator[JournalEntry]:
        """See `Journal.unfinished`."""
        return (entry for entry in self._entries.values() if not entry.is_ended)

    def __len__(self) -> int:
        return len(self._entries)


class DensePool:
    """Keeps `num_streams` streams up while `run` runs; `on_connection(is_connected)` tells of the first and the last.

    A sequence waits for `peers.connect_timeout_s` when there is no stream at all, then fails with `PeerError`.
    Streams that ended up with one worker are too many: a new sequence goes to the first of them, and the others,
    once they are empty, are opened anew until they find a worker of their own. So new replicas are found, too.
    """

    def __init__(
        self,
        address: str,
        peers: PeerSection,
        journal: Journal,
        on_connection: Callable[[bool], Awaitable[None]],
        num_streams: int = 1,
        rebalance_interval_s: float = REBALANCE_INTERVAL_S,
    ) -> None:
        self._address = address
        self._peers = peers
        self._journal = journal
        self._on_connection = on_connection
        self._rebalance_interval_s = rebalance_interval_s
        self._model: ServedModel | None = None
        self.stall: stall_pb2.Stall | None = None  # that the gateway's watchdog sees
        self._is_connected = asyncio.Event()
        self._shares = [Share(journal) for _ in range(num_streams)]
        for share in self._shares:
            share.client = DenseClient(
                address,
                peers,
                share,
                partial(self._note_connection, share),
                accept=partial(self._accept, share),
                adopt=partial(self._adopt, share),
            )

    async def wait_connected(self) -> None:
        """Returns once a stream is up. Raises `PeerError` after `peers.connect_timeout_s`."""
        try:
            async with asyncio.timeout(self._peers.connect_timeout_s):
                await self._is_connected.wait()
        except TimeoutError:
            raise self._shares[0].client.absence() from None

    @property
    def is_connected(self) -> bool:
        """Whether there is a stream."""
        return self._is_connected.is_set()

    @property
    def has_model(self) -> bool:
        """Whether a dense worker has answered once."""
        return self._model is not None

    @property
    def model(self) -> ServedModel:
        """What is served. Raises `PeerError` until a dense worker has answered once."""
        if self._model is None:
            raise PeerError(f"dense worker at {self._address} is not connected yet")
        return self._model

    @property
    def num_resubmitted(self) -> int:
        """Sequences that were under way when a stream broke, in all."""
        return sum(share.client.num_resubmitted for share in self._shares)

    @property
    def num_messages(self) -> int:
        """From dense workers, in all."""
        return sum(share.client.num_messages for share in self._shares)

    @property
    def num_workers(self) -> int:
        """Dense workers that streams reach now."""
        return len({share.client.worker for share in self._shares if share.client.is_connected})

    def unready_reason(self) -> str | None:
        """Why no sequence could run now; None: they can."""
        if not self.is_connected:
            return self._shares[0].client.unready_reason()
        return None if self.stall is None else describe_stall(self.stall)

    def submit(self, entry: JournalEntry) -> None:
        """Starts a sequence of the journal, now or as soon as there is a stream."""
        share = self._least_busy()
        share.add(entry)
        share.client.submit(entry)

    def cancel(self, entry: JournalEntry) -> None:
        """Makes the dense worker forget a sequence."""
        if entry.share is not None:
            entry.share.client.cancel(entry)

    async def run(self) -> None:
        """Connects, and connects again after each break, until cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            channel: grpc.aio.Channel | None = None
            if is_balanced(self._address):  # taking turns is a channel's business: one for all streams
                channel = await stack.enter_async_context(
                    open_channel(self._address, self._peers.max_message_bytes, read_peer_tls(self._peers))
                )
            streams = [share.client.run(channel) for share in self._shares]
            await run_together(self._rebalance(), *streams)

    def _least_busy(self) -> Share:
        connected = [share for share in self._shares if share.client.is_connected]
        return min(self._first_of_each_worker(connected) or self._shares, key=len)

    def _first_of_each_worker(self, shares: list[Share]) -> list[Share]:
        return list({share.client.worker: share for share in reversed(shares)}.values())

    async def _rebalance(self) -> None:
        while True:
            await asyncio.sleep(self._rebalance_interval_s)
            connected = [share for share in self._shares if share.client.is_connected]
            needed = self._first_of_each_worker(connected)
            for share in connected:
                is_idle = next(share.unfinished(), None) is None
                if share not in needed and is_idle and is_balanced(self._address):
                    share.client.reopen()

    def _accept(self, share: Share, model: ServedModel) -> None:
        """Raises `PeerError` for a worker whose weights are not those of the others."""
        has_others = any(other.client.is_connected for other in self._shares if other is not share)
        if self._model is not None and self._model.weights_hash != model.weights_hash:
            if has_others:
                raise PeerError(
                    f"a dense worker at {self._address} has weights {model.weights_hash}, "
                    f"the others have {self._model.weights_hash}"
                )
            for entry in self._journal.unfinished():
                entry.fail(RequestAborted("the dense worker came back with other weights"))
        if self._model is not None and has_others:  # any of them may get any sequence
            model = replace(model, max_model_len=min(model.max_model_len, self._model.max_model_len))
        self._model = model

    def _adopt(self, share: Share) -> None:
        """Before a stream continues its own sequences: those of streams that are down are its own now."""
        for other in self._shares:
            if other is not share and not other.client.is_connected:
                for entry in self._release(other):
                    share.add(entry)

    def _release(self, share: Share) -> list[JournalEntry]:
        share.client.forget()
        return list(share.unfinished())  # those that ended stay, and are closed here

    async def _note_connection(self, share: Share, is_connected: bool) -> None:
        is_any_connected = any(other.client.is_connected for other in self._shares)
        if not is_connected and is_any_connected:
            entries = self._release(share)
            for entry in entries:
                target = self._least_busy()
                target.add(entry)
                target.client.resubmit(entry)
            if entries:
                log.warning("sequences moved to other dense workers", address=self._address, num_moved=len(entries))
        if is_any_connected != self.is_connected:
            if is_any_connected:
                self._is_connected.set()
            else:
                self._is_connected.clear()
            await self._on_connection(is_any_connected)
