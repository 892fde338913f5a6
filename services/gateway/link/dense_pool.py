"""Several streams to dense workers that serve the same model: one worker, or replicas behind one name.

gRPC resolves the name, watches the health of replicas and uses the healthy ones in turn. `DensePool` only decides which
stream runs which sequence. When a worker dies, only its sequences move to another stream. Runs in the gateway's event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import PeerSection
from services.common.errors import PeerError, RequestAborted
from services.gateway.link.dense_client import DenseClient
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry
from services.gateway.link.served_model import ServedModel
from services.pb import stall_pb2
from services.rpc.client import is_balanced, open_channel, read_peer_tls
from services.rpc.server import run_together
from services.rpc.start_deadline import StartDeadline
from services.rpc.watchdog import CHECKS_PER_BOUND, Progress, describe_stall

log = structlog.get_logger()

REBALANCE_INTERVAL_S = 5.0


class DensePool:
    """Keeps `num_streams` streams connected while `run` runs.

    `on_connection(is_connected)` is called when the first stream connects and when the last one breaks. Without any
    stream, a sequence waits for `peers.connect_timeout_s`, then fails with `PeerError`. If several streams lead to one
    worker, new sequences go to the first of them; the others are reopened when they are empty, until each finds a
    worker of its own. This also finds new replicas.
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
        self.prefix_generation = 0  # see `StreamPool`
        self.stall: stall_pb2.Stall | None = None  # a stall that the gateway's watchdog has noticed
        self._is_connected = asyncio.Event()
        self._clients = [DenseClient(address, peers, journal.new_stream(), self) for _ in range(num_streams)]
        self._client_of = {client.sequences: client for client in self._clients}

    async def wait_connected(self) -> None:
        """Waits until a stream is connected.

        Raises `PeerError` after `peers.connect_timeout_s` in which no dense worker that loads has made progress.
        """
        deadline = StartDeadline(self._peers.connect_timeout_s)
        watching = asyncio.create_task(deadline.watch(self._address, self._peers))
        try:
            while (remaining_s := deadline.remaining_s) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(remaining_s):
                        await self._is_connected.wait()
                        return
            raise self._clients[0].absence()
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    @property
    def is_connected(self) -> bool:
        """Whether any stream is connected."""
        return self._is_connected.is_set()

    @property
    def has_model(self) -> bool:
        """Whether a dense worker has answered once."""
        return self._model is not None

    @property
    def model(self) -> ServedModel:
        """The served model. Raises `PeerError` until a dense worker has answered once."""
        if self._model is None:
            raise PeerError(f"dense worker at {self._address} is not connected yet")
        return self._model

    @property
    def num_resubmitted(self) -> int:
        """Total number of sequences that were running when a stream broke."""
        return sum(client.num_resubmitted for client in self._clients)

    @property
    def num_messages(self) -> int:
        """Total number of messages from dense workers."""
        return sum(client.num_messages for client in self._clients)

    def unready_reason(self) -> str | None:
        """Why no sequence can run now; None if sequences can run."""
        if not self.is_connected:
            return self._clients[0].unready_reason()
        return None if self.stall is None else describe_stall(self.stall)

    def submit(self, entry: JournalEntry) -> None:
        """Starts a sequence of the journal, now or as soon as a stream is connected."""
        client = self._least_busy()
        client.sequences.add(entry)
        client.submit(entry)

    def announce(self) -> None:
        """A request has begun to arrive: idle workers may get ready for it."""
        for client in self._clients:
            client.announce()

    def cancel(self, entry: JournalEntry) -> None:
        """Makes the dense worker forget a sequence, which the journal must still have.

        A follower was not submitted: its search ends with the entry that was.
        """
        if entry.stream is not None:
            self._client_of[entry.stream].cancel(entry)

    async def forget_prefixes(self) -> None:
        """Sequences that are submitted from now on find no blocks of earlier ones.

        All connected workers have confirmed it at the end; others get to know before they get a sequence from here.
        Raises `PeerError` if none is connected, or names those that have not confirmed within `peers.rpc_timeout_s`.
        """
        connected = [client for client in self._clients if client.is_connected]
        if not connected:
            raise PeerError(self._clients[0].unready_reason())
        timeout_s = self._peers.rpc_timeout_s
        asked = {client.forget_prefixes(): client.worker for client in self._first_of_each_worker(connected)}
        await asyncio.wait(asked, timeout=timeout_s)
        silent = [f"{worker:x}" for each, worker in asked.items() if not (each.done() and each.result())]
        if silent:
            raise PeerError(
                f"the cache may not be flushed: of the dense workers at {self._address}, {', '.join(silent)} went away"
                f" or did not confirm it within {timeout_s:g} s; flush it again"
            )

    async def run(self) -> None:
        """Connects, and connects again after each break, until cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            channel: grpc.aio.Channel | None = None
            if is_balanced(self._address):  # a single channel distributes all streams
                channel = await stack.enter_async_context(
                    open_channel(self._address, self._peers.max_message_bytes, read_peer_tls(self._peers))
                )
            streams = [client.run(channel) for client in self._clients]
            await run_together(self._rebalance(), *streams)

    def accept(self, client: DenseClient, model: ServedModel) -> None:
        """Accepts the worker that a stream has found. Raises `PeerError` if its weights differ from those of others."""
        has_others = any(other.is_connected for other in self._clients if other is not client)
        if self._model is not None and self._model.weights_hash != model.weights_hash:
            if has_others:
                raise PeerError(
                    f"a dense worker at {self._address} has weights {model.weights_hash}, "
                    f"the others have {self._model.weights_hash}"
                )
            if not model.continues_sequences:
                for entry in self._journal.unfinished():
                    entry.fail(RequestAborted("the dense worker came back with other weights"))
        if self._model is not None and has_others:  # every worker may get any sequence
            model = replace(model, max_model_len=min(model.max_model_len, self._model.max_model_len))
        self._model = model

    def assign_orphaned_sequences(self, client: DenseClient) -> None:
        """Gives the sequences of broken streams to this stream, before it continues its own."""
        for other in self._clients:
            if other is not client and not other.is_connected:
                for entry in self._release(other):
                    client.sequences.add(entry)

    async def note_connection(self, client: DenseClient, is_connected: bool) -> None:
        """Moves the sequences of a broken stream to another one, if there is one. Reports the first and last stream."""
        is_any_connected = any(other.is_connected for other in self._clients)
        if not is_connected and is_any_connected:
            entries = self._release(client)
            for entry in entries:
                target = self._least_busy()
                target.sequences.add(entry)
                target.resubmit(entry)
            if entries:
                log.warning("sequences moved to other dense workers", address=self._address, num_moved=len(entries))
        if is_any_connected != self.is_connected:
            if is_any_connected:
                self._is_connected.set()
            else:
                self._is_connected.clear()
            await self._on_connection(is_any_connected)

    def _release(self, client: DenseClient) -> list[JournalEntry]:
        client.forget()
        return list(client.sequences.unfinished())  # ended sequences stay and are closed here

    def _least_busy(self) -> DenseClient:
        if len(self._clients) == 1:
            return self._clients[0]
        connected = [client for client in self._clients if client.is_connected]
        candidates = self._first_of_each_worker(connected) or self._clients
        return min(candidates, key=lambda client: len(client.sequences))

    def _first_of_each_worker(self, clients: list[DenseClient]) -> list[DenseClient]:
        return list({client.worker: client for client in reversed(clients)}.values())

    async def _rebalance(self) -> None:
        while True:
            await asyncio.sleep(self._rebalance_interval_s)
            connected = [client for client in self._clients if client.is_connected]
            needed = self._first_of_each_worker(connected)
            for client in connected:
                is_idle = next(client.sequences.unfinished(), None) is None
                if client not in needed and is_idle and is_balanced(self._address):
                    client.reopen()


class DenseProgress:
    """The dense worker's progress, for the gateway's `Watchdog`.

    Every message counts as progress. But during a long prompt, or with a full queue, no message may arrive for minutes.
    So while there is work, the gateway also checks the worker's health, which depends on the worker's own watchdog.
    """

    def __init__(
        self, address: str, peers: PeerSection, journal: Journal, dense: DensePool, stall_timeout_s: float
    ) -> None:
        self._address = address
        self._max_message_bytes = peers.max_message_bytes
        self._tls = read_peer_tls(peers)
        self._journal = journal
        self._dense = dense
        self._interval_s = stall_timeout_s / CHECKS_PER_BOUND
        self._num_answers = 0  # health checks answered with SERVING

    def progress(self) -> Progress | None:
        """None without open requests, and without a stream, which the gateway reports anyway."""
        if not self._dense.is_connected:
            return None
        request_ids = tuple(dict.fromkeys(entry.spec.request_id for entry in self._journal.unfinished()))
        if not request_ids:
            return None
        return Progress(
            (self._dense.num_messages, self._num_answers), request_ids=request_ids, waits_for="dense_worker"
        )

    async def run(self) -> None:
        """Checks the health until cancelled."""
        async with open_channel(self._address, self._max_message_bytes, self._tls) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while True:
                await asyncio.sleep(self._interval_s)
                if self.progress() is None:
                    continue
                with contextlib.suppress(grpc.aio.AioRpcError):  # no answer is no progress
                    reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=self._interval_s)
                    self._num_answers += reply.status == health_pb2.HealthCheckResponse.SERVING
