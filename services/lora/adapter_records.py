"""`AdapterRecords`: which adapters clients have loaded, in files that outlive a gateway and that its peers share."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

log = structlog.get_logger()

DIRECTORY = ".twostroke"  # below gateway.lora_directory
SUFFIX = ".json"
NEW_PREFIX = "new-"  # of a file before its rename
MAX_WRITE_S = 60.0  # a new file that is older belongs to nobody
MAX_RECORD_BYTES = 16_384


class AdapterRecords:
    """A file for each owner and name, written by a rename: no crash leaves half a file, and gateways need no lock.

    Its methods read and write files, so call them in a thread. They raise `OSError`.
    """

    def __init__(self, lora_directory: Path) -> None:
        self._directory = lora_directory / DIRECTORY

    def write(self, owner: str, name: str, path: Path) -> None:
        """owner: the name of the API key that it belongs to, or empty; path: relative to the directory of adapters."""
        self._directory.mkdir(exist_ok=True)
        self._remove_abandoned()
        number, temporary = tempfile.mkstemp(prefix=NEW_PREFIX, dir=self._directory)
        try:
            with open(number, "w", encoding="utf-8") as file:
                json.dump({"owner": owner, "name": name, "path": str(path)}, file)
                file.flush()
                os.fsync(number)
            os.replace(temporary, self._file(owner, name))
        except BaseException:
            os.unlink(temporary)
            raise

    def remove(self, owner: str, name: str) -> None:
        """Does nothing if there is no such record."""
        self._file(owner, name).unlink(missing_ok=True)

    def read(self) -> list[tuple[str, str, str]]:
        """Owners, names and paths, in order. A damaged file is logged and left out."""
        return sorted(self._records(self._directory.glob(f"*{SUFFIX}")))

    def _records(self, files: Iterable[Path]) -> Iterable[tuple[str, str, str]]:
        for file in files:
            try:
                with file.open(encoding="utf-8") as opened:
                    record = json.loads(opened.read(MAX_RECORD_BYTES))
                found = record.get("owner", ""), record["name"], record["path"]
                if not all(isinstance(each, str) for each in found):
                    raise TypeError("owner, name and path must be strings")
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                log.warning("a record of an adapter is damaged", file=str(file), reason=str(error))
            else:
                yield found

    def _remove_abandoned(self) -> None:
        """Removes what processes have left that were killed within `write`.

        A file has only the wall clock. If that steps forward while another process writes, at worst its load fails.
        """
        for file in self._directory.glob(f"{NEW_PREFIX}*"):
            try:
                if time.time() - file.stat().st_mtime > MAX_WRITE_S:
                    file.unlink()
            except FileNotFoundError:  # it has just been renamed
                pass
            except OSError as error:  # of another user: no reason to write none
                log.warning("a part of an adapter's record cannot be removed", file=str(file), reason=str(error))

    def _file(self, owner: str, name: str) -> Path:
        prefix = f"{_hash(owner)}-" if owner else ""
        return self._directory / f"{prefix}{_hash(name)}{SUFFIX}"


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
