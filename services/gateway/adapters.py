"""`Adapters`: the adapters that this gateway serves, by name. The gateway owns this list.

A dense worker has no list: every sequence carries its LoRA adapter's directory and hash, and the worker loads what it
needs; virtual tokens of prompt tuning are sent with the prompt. So a new dense worker needs nothing but the sequences.
An adapter that is unloaded stays usable for the requests that have it already. What clients have loaded is recorded, so
that a gateway that starts again has it, too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog

from services.common.config import MAX_MODEL_NAME_CHARACTERS
from services.common.errors import (
    CapacityError,
    ConfigError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TwostrokeError,
)
from services.common.shorten import quote
from services.gateway.model_names import ModelNames
from services.lora.adapter import Adapter
from services.lora.adapter_records import AdapterRecords
from services.lora.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Shapes, check_adapter, read_config
from services.lora.prompt_tuning import read_virtual_tokens

log = structlog.get_logger()

MAX_ADAPTERS = 1024
MAX_VIRTUAL_TOKEN_BYTES = 2**30  # of all adapters together
MAX_PATH_CHARACTERS = 1024
MAX_LOADS = 8  # at the same time; one of them runs


class Adapters:
    """Adds to and removes from `names.adapters`. Runs in the event loop; files are read in a thread."""

    def __init__(
        self, names: ModelNames, shapes: Shapes, hidden_size: int, max_rank: int, directory: Path | None
    ) -> None:
        """shapes: of the served model's layers; directory: below which clients may load adapters; None: they may not"""
        self._names = names
        self._shapes = shapes
        self._hidden_size = hidden_size
        self._max_rank = max_rank
        self._directory = directory
        self._records = None if directory is None else AdapterRecords(directory)
        self._loading = asyncio.Lock()
        self._loads: set[asyncio.Task[Adapter]] = set()
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def can_change(self) -> bool:
        """Whether clients may load and unload adapters."""
        return self._directory is not None

    @property
    def loaded(self) -> Mapping[str, Adapter]:
        """The present adapters, by name."""
        return self._names.adapters

    async def load_configured(self, modules: Iterable[str]) -> None:
        """Loads the adapters of `gateway.lora_modules`, each NAME=DIRECTORY. Raises `ConfigError`."""
        for module in modules:
            name, _, path = module.partition("=")
            try:
                self._check_name(name, replaces=False)
                await self._load(name, Path(path).absolute())
            except (InvalidRequest, OSError) as error:
                raise ConfigError(f"gateway.lora_modules has {module!r}: {error}") from error

    async def load_recorded(self) -> None:
        """Loads what clients had loaded before, also in place of configured ones. What cannot be loaded is logged."""
        if self._directory is None or self._records is None:
            return
        for name, path in await asyncio.to_thread(self._records.read):
            try:
                self._check_name(name, replaces=True)
                await self._load(name, await asyncio.to_thread(find_below, self._directory, path))
            except (TwostrokeError, OSError) as error:
                log.warning("an adapter that a client had loaded is not served", adapter=name, reason=str(error))

    async def load(self, name: str, path: str, *, replaces: bool = False) -> Adapter:
        """Loads an adapter for a client; one of the same name only if `replaces` is set. Goes on if it is cancelled.

        Raises `InvalidRequest`, `NotFound` for a directory that does not exist, or `CapacityError`.
        """
        directory = self._changeable_directory()
        if not name or not path:
            missing = "lora_path" if name else "lora_name"
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.", missing)
        self._check_name(name, replaces)
        if len(self._loads) == MAX_LOADS:
            raise CapacityError(f"{MAX_LOADS} adapters are being loaded, which is the limit")
        load = asyncio.create_task(self._load_in_turn(name, directory, path, replaces))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        return await asyncio.shield(load)  # a thread cannot be cancelled: also without a client it has its turn

    async def unload(self, name: str) -> None:
        """Forgets an adapter; requests that have it go on. Goes on if it is cancelled.

        Raises `NotFound` if there is none with this name.
        """
        self._changeable_directory()
        if not name:
            raise InvalidRequest("'lora_name' must be provided.", "lora_name")
        if name not in self._names.adapters:
            raise NotFound(f"The lora adapter {quote(name)} cannot be found.", "lora_name")
        del self._names.adapters[name]
        log.info("adapter unloaded", adapter=name)
        removal = asyncio.create_task(self._remove_record(name))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        await asyncio.shield(removal)

    def _changeable_directory(self) -> Path:
        if self._directory is None:
            raise PermissionDenied("adapters cannot be changed here: gateway.lora_directory is not set")
        return self._directory

    def _check_name(self, name: str, replaces: bool) -> None:
        if len(name) > MAX_MODEL_NAME_CHARACTERS:
            raise InvalidRequest(
                f"lora_name has {len(name)} characters, at most {MAX_MODEL_NAME_CHARACTERS} allowed", "lora_name"
            )
        if name in self._names.names:
            raise InvalidRequest(f"lora_name {name!r} is a name of the served model", "lora_name")
        if name in self._names.adapters:
            if not replaces:
                raise InvalidRequest(
                    f"The lora adapter {name!r} has already been loaded. To load it again, set 'load_inplace' to true.",
                    "lora_name",
                )
        elif len(self._names.adapters) >= MAX_ADAPTERS:
            raise InvalidRequest(f"{MAX_ADAPTERS} adapters are loaded, which is the limit; unload one", "lora_name")

    async def _load_in_turn(self, name: str, directory: Path, path: str, replaces: bool) -> Adapter:
        async with self._loading:
            self._check_name(name, replaces)  # another call may have loaded it meanwhile
            found = await asyncio.to_thread(find_below, directory, path)
            adapter = await self._load(name, found)
            await self._record(name, found.relative_to(directory.resolve()))
            return adapter

    async def _record(self, name: str, path: Path | None) -> None:
        """None: removes the record. If that fails, the adapter is served, or not, until the next start only."""
        assert self._records is not None
        try:
            if path is None:
                await asyncio.to_thread(self._records.remove, name)
            else:
                await asyncio.to_thread(self._records.write, name, path)
        except OSError as error:
            log.warning("not recorded: the change is lost at the next start", adapter=name, reason=str(error))

    async def _remove_record(self, name: str) -> None:
        async with self._loading:
            if name not in self._names.adapters:  # else another call has loaded it again
                await self._record(name, None)

    async def _load(self, name: str, path: Path) -> Adapter:
        try:
            adapter = await asyncio.to_thread(self._read, name, path)
        except InvalidRequest as error:
            raise InvalidRequest(f"Loading lora {name} failed: {error}", "lora_path") from error
        self._check_memory(adapter)
        self._names.adapters[name] = adapter
        num_virtual_tokens = {} if adapter.table is None else {"num_virtual_tokens": adapter.table.num_rows}
        log.info("adapter loaded", adapter=name, path=str(path), hash=adapter.hash[:16], **num_virtual_tokens)
        return adapter

    def _check_memory(self, adapter: Adapter) -> None:
        """The gateway keeps virtual tokens in memory, and sends them with prompts."""
        tables = [each.table for each in (self._names.adapters | {adapter.name: adapter}).values()]
        num_bytes = sum(len(table.values) for table in tables if table is not None)
        if adapter.table is not None and num_bytes > MAX_VIRTUAL_TOKEN_BYTES:
            raise InvalidRequest(
                f"Loading lora {adapter.name} failed: the virtual tokens of all adapters would have {num_bytes} bytes, "
                f"at most {MAX_VIRTUAL_TOKEN_BYTES} allowed; unload one",
                "lora_path",
            )

    def _read(self, name: str, path: Path) -> Adapter:
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
