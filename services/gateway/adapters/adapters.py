"""`Adapters`: loads and unloads the adapters that the gateways of this server serve. The gateways own this list.

A dense worker has no list: every sequence carries its LoRA adapter's directory and hash, and the worker loads what it
needs; virtual tokens of prompt tuning are sent with the prompt. So a new dense worker needs nothing but the sequences.
An adapter that is unloaded stays usable for the requests that have it already. What clients have loaded is recorded, so
that a gateway that starts again has it, too.

An adapter that a client loads belongs to its API key: no other key can name, replace or unload it. Those of the config,
of keys in `gateway.adapter_admins`, and of callers without a key are shared by all.

A change reaches all gateways or none. The one that is asked makes it, and holds the lock of `GatewayPeers` meanwhile:
it has all peers read the adapter, records it, has all of them serve it, and then does so itself. If one of them fails
meanwhile, all serve again what they did before. If it dies itself, the next one to hold the lock, at the latest the
process in its place, has all of them serve what is recorded; and again with the next change, while one of them cannot,
such as one that hangs. A peer that starts listens before it reads the records, so it misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from services.common.config import MAX_MODEL_NAME_CHARACTERS
from services.common.errors import (
    CapacityError,
    ConfigError,
    InvalidRequest,
    NotFound,
    PeerError,
    PermissionDenied,
    QueueTimeout,
    TwostrokeError,
)
from services.common.fairness import Client, ClientTurns
from services.common.shorten import quote
from services.gateway.access.access import Caller
from services.gateway.adapters.adapter_list import SHARED, AdapterList
from services.gateway.link.gateway_peers import GatewayPeers
from services.gateway.request.model_limits import ModelNames
from services.lora.adapter import Adapter
from services.lora.adapter_records import AdapterRecords
from services.lora.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Shapes, check_adapter, read_config
from services.lora.prompt_tuning import read_virtual_tokens
from services.pb import gateway_peers_pb2

log = structlog.get_logger()

MAX_PATH_CHARACTERS = 1024
MAX_CHANGES = 256  # that wait for their turns, or have one
MAX_CHANGES_OF_CLIENT = 64
MAX_WAIT_S = 60.0  # for a turn

T = TypeVar("T")


class Adapters:
    """Runs in the event loop; files are read in a thread."""

    def __init__(
        self,
        names: ModelNames,
        shapes: Shapes,
        hidden_size: int,
        max_rank: int,
        directory: Path | None,
        peers: GatewayPeers,
        admins: Collection[str] = (),
    ) -> None:
        """shapes: of the served model's layers; directory: below which clients may load adapters; None: they may not.

        admins: the names of the API keys whose adapters are shared
        """
        self.names = names
        self._shapes = shapes
        self._hidden_size = hidden_size
        self._max_rank = max_rank
        self._directory = directory
        self._peers = peers
        self._admins = frozenset(admins)
        self._records = None if directory is None else AdapterRecords(directory)
        self._list = AdapterList()
        self._staged: tuple[str, Adapter] | None = None  # for a peer: the owner, and what it will belong to it
        self._replaced: tuple[str, Adapter] | None = None  # the same of what was served before a peer's last change
        self._changed_at_start: set[tuple[str, str]] | None = set()  # by peers, while the records are loaded
        self._turns = ClientTurns(1)
        self._changes: set[asyncio.Task[Any]] = set()
        self._changes_of = Counter[Client]()

    @property
    def can_change(self) -> bool:
        """Whether clients may load and unload adapters."""
        return self._directory is not None

    def names_for(self, caller: Caller) -> ModelNames:
        """The names of models that a caller's requests may use."""
        adapters = self._list.visible_to(caller.name)
        return replace(self.names, adapters=adapters) if adapters else self.names

    @property
    def shared_names(self) -> Collection[str]:
        """The names of the adapters that all callers may use."""
        return self._list.of(SHARED).keys()

    async def load_configured(self, modules: Iterable[str]) -> None:
        """Loads the adapters of `gateway.lora_modules`, each NAME=DIRECTORY. Raises `ConfigError`."""
        for module in modules:
            name, _, path = module.partition("=")
            try:
                self._check_name(SHARED, name, replaces=False)
                self._put(SHARED, await self._read(name, Path(path).absolute()))
            except (InvalidRequest, OSError) as error:
                raise ConfigError(f"gateway.lora_modules has {module!r}: {error}") from error

    async def load_recorded(self, key_names: Collection[str]) -> None:
        """Loads what clients had loaded before, also in place of configured ones.

        What cannot be loaded, or belongs to none of these keys, is logged.
        """
        if self._directory is not None and self._records is not None:
            for owner, name, path in await asyncio.to_thread(self._records.read):
                try:
                    await self._load_recorded(owner, name, path, key_names)
                except (TwostrokeError, OSError) as error:
                    reason = str(error)
                    log.warning("an adapter that a client had loaded is not served", adapter=name, reason=reason)
            if self._peers.has_unfinished_change:
                async with self._peers.changing(waits=False) as unfinished:
                    await self._finish(unfinished)
        self._changed_at_start = None

    async def load(self, caller: Caller, name: str, path: str, *, replaces: bool = False) -> Adapter:
        """Loads an adapter for a client; one of the same name only if `replaces` is set. Goes on if it is cancelled.

        Raises `InvalidRequest`, `NotFound` for a directory that does not exist, `CapacityError`, `QueueTimeout`, or
        `PeerError` if a peer cannot load it.
        """
        directory = self._changeable_directory()
        if not name or not path:
            missing = "lora_path" if name else "lora_name"
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.", missing)
        owner = self._owner_for(caller)
        self._check_name(owner, name, replaces)
        return await self._in_turn(caller, owner, name, self._load(owner, name, directory, path, replaces))

    async def unload(self, caller: Caller, name: str) -> None:
        """Forgets an adapter; requests that have it go on. Goes on if it is cancelled.

        Raises `NotFound` if there is none with this name, `PermissionDenied` if it is shared and the caller may not
        change it, `CapacityError`, `QueueTimeout`, or `PeerError`.
        """
        self._changeable_directory()
        if not name:
            raise InvalidRequest("'lora_name' must be provided.", "lora_name")
        if not self._peers.has_unfinished_change:  # else it may be this one, which a peer does not know of yet
            self._check_loaded(caller, name)
        await self._in_turn(caller, self._owner_for(caller), name, self._unload(caller, name))

    async def stage(self, message: gateway_peers_pb2.PeerAdapter) -> None:
        """Reads an adapter for a peer. Raises what `load` raises."""
        self._staged = None
        self._staged = message.owner, await self._read_for_peer(message)

    def unstage(self) -> None:
        """Drops what has been staged last."""
        self._staged = None

    async def serve(self, message: gateway_peers_pb2.PeerAdapter) -> None:
        """Serves what a peer has staged, or what this process serves or did before; else it reads that first."""
        owner, present = message.owner, self._list.of(message.owner).get(message.name)
        served = None if present is None else (owner, present)
        wanted = owner, message.name, message.hash
        known = [each for each in (self._staged, served, self._replaced) if each is not None]
        self._staged = None
        adapter = next((each for whose, each in known if (whose, each.name, each.hash) == wanted), None)
        if adapter is None:
            adapter = await self._read_for_peer(message)
        self._note_change(owner, message.name)
        self._replaced = served
        self._put(owner, adapter)

    def forget(self, owner: str, name: str) -> None:
        """Forgets an adapter because a peer has; requests that have it go on."""
        self._note_change(owner, name)
        self._list.remove(owner, name)
        log.info("adapter unloaded", adapter=name, owner=owner)

    def _owner_for(self, caller: Caller) -> str:
        """To whom the adapters belong that a caller loads."""
        return SHARED if caller.key is None or caller.name in self._admins else caller.name

    def _changeable_directory(self) -> Path:
        if self._directory is None:
            raise PermissionDenied("adapters cannot be changed here: gateway.lora_directory is not set")
        return self._directory

    def _check_name(self, owner: str, name: str, replaces: bool) -> None:
        if len(name) > MAX_MODEL_NAME_CHARACTERS:
            raise InvalidRequest(
                f"lora_name has {len(name)} characters, at most {MAX_MODEL_NAME_CHARACTERS} allowed", "lora_name"
            )
        if name in self.names.names:
            raise InvalidRequest(f"lora_name {name!r} is a name of the served model", "lora_name")
        if name in self._list.of(owner) and not replaces:
            raise InvalidRequest(
                f"The lora adapter {name!r} has already been loaded. To load it again, set 'load_inplace' to true.",
                "lora_name",
            )
        self._list.check_number(owner, name)

    def _check_loaded(self, caller: Caller, name: str) -> None:
        owner = self._owner_for(caller)
        if name in self._list.of(owner):
            return
        if name in self._list.of(SHARED):
            raise PermissionDenied(
                f"the lora adapter {quote(name)} is shared: only a key in gateway.adapter_admins may unload it",
                "lora_name",
            )
        raise NotFound(f"The lora adapter {quote(name)} cannot be found.", "lora_name")

    async def _in_turn(self, caller: Caller, owner: str, name: str, change: Coroutine[Any, Any, T]) -> T:
        """Makes a change of an adapter when it is this caller's turn. Clients take turns, and so do the gateways."""
        client = caller.client_id
        try:
            if len(self._changes) >= MAX_CHANGES:
                raise CapacityError(f"{MAX_CHANGES} loads of adapters wait, which is the limit")
            if self._changes_of[client] >= MAX_CHANGES_OF_CLIENT:
                raise CapacityError(f"{MAX_CHANGES_OF_CLIENT} loads of adapters of this client wait, the limit")
        except CapacityError:
            change.close()
            raise
        self._changes_of[client] += 1
        task = asyncio.create_task(self._wait_and_make(client, json.dumps([owner, name]), change))
        self._changes.add(task)
        task.add_done_callback(lambda task: self._note_done(task, client))
        return await asyncio.shield(task)  # a thread cannot be cancelled: also without a client it has its turn

    def _note_done(self, task: asyncio.Task[Any], client: Client) -> None:
        self._changes.discard(task)
        self._changes_of[client] -= 1
        if not self._changes_of[client]:
            del self._changes_of[client]
        if not task.cancelled():
            task.exception()  # its client may have gone away

    async def _wait_and_make(self, client: Client, what: str, change: Coroutine[Any, Any, T]) -> T:
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await turn.enter_async_context(self._turns.turn(client))
                    unfinished = await turn.enter_async_context(self._peers.changing(what))
                await self._finish(unfinished)
                if what in unfinished:
                    raise PeerError("an earlier change of this adapter has not reached all gateways yet: try again")
            except BaseException as error:
                change.close()
                if isinstance(error, TimeoutError):
                    raise QueueTimeout(f"other adapters were being loaded for {MAX_WAIT_S:g} s, the limit") from None
                raise
            return await change

    async def _finish(self, unfinished: list[str]) -> None:
        """Has all gateways serve what is recorded of the adapters that others were changing when they died.

        Leaves those in the list of which a peer may not know yet.
        """
        for change in list(unfinished):
            unfinished.remove(change)
            owner, name = json.loads(change)
            try:
                path = await asyncio.to_thread(self._recorded_path, owner, name)
                if path is None:
                    await self._forget_everywhere(owner, name)
                    continue
                found = await asyncio.to_thread(find_below, self._changeable_directory(), str(path))
                adapter = await self._read(name, found)
                message = gateway_peers_pb2.PeerAdapter(owner=owner, name=name, path=str(path), hash=adapter.hash)
                await self._peers.serve_adapter(message)
                self._put(owner, adapter)
            except (TwostrokeError, OSError) as error:
                if isinstance(error, PeerError):  # such as one that hangs: with the next change it is told again
                    unfinished.append(change)
                log.warning("gateways may differ: a change was not finished", adapter=name, reason=str(error))

    async def _load(self, owner: str, name: str, directory: Path, path: str, replaces: bool) -> Adapter:
        self._check_name(owner, name, replaces)  # another call may have loaded it meanwhile
        found = await asyncio.to_thread(find_below, directory, path)
        adapter = await self._read(name, found)
        self._list.check_memory(owner, adapter)
        relative = found.relative_to(directory.resolve())
        message = gateway_peers_pb2.PeerAdapter(owner=owner, name=name, path=str(relative), hash=adapter.hash)
        await self._peers.stage_adapter(message)
        recorded = await asyncio.to_thread(self._recorded_path, owner, name)
        await self._record(owner, name, relative)
        try:
            await self._peers.serve_adapter(message)
        except PeerError as error:
            await self._record(owner, name, recorded)
            await self._take_back(owner, name, error)
            raise
        self._put(owner, adapter)
        return adapter

    async def _take_back(self, owner: str, name: str, reason: PeerError) -> None:
        """Has all peers serve what this process still does. Raises `PeerError` if one of them cannot."""
        previous = self._list.of(owner).get(name)
        try:
            if previous is None:
                await self._peers.forget_adapter(owner, name)
                return
            path = os.path.relpath(previous.path, self._changeable_directory().resolve())  # if it has to be read again
            message = gateway_peers_pb2.PeerAdapter(owner=owner, name=name, path=path, hash=previous.hash)
            await self._peers.serve_adapter(message)
        except PeerError as error:
            raise PeerError(f"{reason}; and it could not be taken back everywhere: {error}") from error

    def _recorded_path(self, owner: str, name: str) -> Path | None:
        assert self._records is not None
        found = (Path(path) for *whose, path in self._records.read() if whose == [owner, name])
        return next(found, None)

    async def _unload(self, caller: Caller, name: str) -> None:
        self._check_loaded(caller, name)
        owner = self._owner_for(caller)
        await self._record(owner, name, None)
        await self._forget_everywhere(owner, name)

    async def _forget_everywhere(self, owner: str, name: str) -> None:
        await self._peers.forget_adapter(owner, name)
        self.forget(owner, name)

    async def _record(self, owner: str, name: str, path: Path | None) -> None:
        """None: removes the record. If that fails, the adapter is served, or not, until the next start only."""
        assert self._records is not None
        try:
            if path is None:
                await asyncio.to_thread(self._records.remove, owner, name)
            else:
                await asyncio.to_thread(self._records.write, owner, name, path)
        except OSError as error:
            log.warning("not recorded: the change is lost at the next start", adapter=name, reason=str(error))

    async def _load_recorded(self, owner: str, name: str, path: str, key_names: Collection[str]) -> None:
        assert self._directory is not None
        if owner != SHARED and owner not in key_names:
            raise NotFound(f"there is no API key {owner!r}, to which it belongs")
        if owner in self._admins:  # it is one since
            owner = SHARED
        self._check_name(SHARED, name, replaces=True)  # the shares of keys have been checked when they were loaded
        adapter = await self._read(name, await asyncio.to_thread(find_below, self._directory, path))
        if self._changed_at_start is None or (owner, name) not in self._changed_at_start:
            self._list.check_memory(SHARED, adapter)
            self._put(owner, adapter)

    def _note_change(self, owner: str, name: str) -> None:
        if self._changed_at_start is not None:
            self._changed_at_start.add((owner, name))

    async def _read_for_peer(self, message: gateway_peers_pb2.PeerAdapter) -> Adapter:
        found = await asyncio.to_thread(find_below, self._changeable_directory(), message.path)
        adapter = await self._read(message.name, found)
        if adapter.hash != message.hash:
            raise InvalidRequest(f"Loading lora {message.name} failed: its files change", "lora_path")
        return adapter

    def _put(self, owner: str, adapter: Adapter) -> None:
        self._list.put(owner, adapter)
        num_virtual_tokens = {} if adapter.table is None else {"num_virtual_tokens": adapter.table.num_rows}
        log.info(
            "adapter loaded",
            adapter=adapter.name,
            owner=owner,
            path=adapter.path,
            hash=adapter.hash[:16],
            **num_virtual_tokens,
        )

    async def _read(self, name: str, path: Path) -> Adapter:
        try:
            return await asyncio.to_thread(self._read_files, name, path)
        except InvalidRequest as error:
            raise InvalidRequest(f"Loading lora {name} failed: {error}", "lora_path") from error

    def _read_files(self, name: str, path: Path) -> Adapter:
        table = read_virtual_tokens(read_config(path), path / WEIGHTS_FILE, self._hidden_size)
        if table is not None:
            return Adapter(name, table.hash, str(path), table)
        return Adapter(name, check_adapter(path, self._shapes, self._max_rank), str(path))


def find_below(directory: Path, path: str) -> Path:
    """The directory of an adapter that a client names, absolute or relative to `directory`.

    Raises `InvalidRequest` if it is not below `directory`, or reaches it by `..` or a symbolic link; `NotFound` if
    there is no such directory.
    """
    if len(path) > MAX_PATH_CHARACTERS or "\0" in path:
        raise InvalidRequest(
            f"lora_path has {len(path)} characters, at most {MAX_PATH_CHARACTERS} allowed, none of them NUL",
            "lora_path",
        )
    root = directory.resolve()
    if ".." in Path(path).parts:
        raise InvalidRequest(f"lora_path {quote(path)} has '..'", "lora_path")
    found = directory.absolute() / path
    if not found.is_relative_to(directory.absolute()) or found == directory.absolute():
        raise InvalidRequest(f"lora_path {quote(path)} is not below gateway.lora_directory", "lora_path")
    inside = root / found.relative_to(directory.absolute())
    files = (inside, inside / CONFIG_FILE, inside / WEIGHTS_FILE)
    if any(os.path.realpath(file) != str(file) for file in files):
        raise InvalidRequest(f"lora_path {quote(path)} has a symbolic link", "lora_path")
    try:
        is_there = inside.is_dir()
    except OSError as error:
        raise InvalidRequest(f"lora_path {quote(path)}: {error.strerror}", "lora_path") from error
    if not is_there:
        raise NotFound(f"Loading lora failed: No adapter found for {quote(path)}", "lora_path")
    return inside
