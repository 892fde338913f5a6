"""`SharedRegion`: a named piece of POSIX shared memory, which other processes can tell from a dead owner's.

The creator holds an exclusive `flock` on the file as long as it lives. A process that starts later can therefore
recognise a region that a killed process left behind, and remove it.

Regions of several ranks share their fate (`tie`). On GPUs, what passes an aborted wait of one rank has no meaning, and
the ranks' next sum carries it to all. So whoever aborts a region first dooms all that are tied to it: hosts that check
a doomed region find it aborted, while no wait ends there before its own abort mark is set.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from services.channel import ChannelAborted
from services.common.errors import CapacityError, PeerError, StaleEpoch
from services.common.process import is_ending

SHM_DIR = Path("/dev/shm")
NAME_PREFIX = "twostroke-"
FIRST_LANE = 0
LINK_SUFFIX = "-plans"  # of sockets, see `message_link`
HEADER_BYTES = 4096
# The header consists of 64-bit words. Words that different processes write lie on separate cache lines.
WORD_BYTES = 8
WORDS_PER_LINE = 8
ABORT_WORD = WORDS_PER_LINE  # not 0 after an abort: waits end
_DOOMED = ABORT_WORD + 1  # not 0 before a region that is tied to this one is aborted
_EPOCH, _ATTACHMENT = 0, 1
_OWNER, _PEER = 2, 3  # see `_process_word`; 0: none yet
_PID = 2**32 - 1  # its part of such a word
_TIE = 4  # the same number in all regions that are tied together; 0: it is alone
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FIRST_FLAG = 2 * WORDS_PER_LINE
NUM_FLAGS = 3
_NUM_ERRORS = _FIRST_FLAG + NUM_FLAGS * WORDS_PER_LINE


class SharedRegion:
    """A header (epoch, attachment, abort marks, flags) and the data after it, `num_bytes` together."""

    def __init__(self, path: Path, file: int, num_bytes: int, *, is_owner: bool) -> None:
        self._path = path
        self._file = file
        self._is_owner = is_owner
        self.memory = mmap.mmap(file, num_bytes)
        self.words = memoryview(self.memory)[:HEADER_BYTES].cast("Q")
        self._tied = contextlib.ExitStack()
        self._tied_words: list[memoryview] = []  # headers of the regions that this end was tied to

    @classmethod
    def create(cls, num_bytes: int, epoch: int, attachment_id: int, lane: int) -> Self:
        """Allocates a zeroed region; raises `CapacityError` when shared memory cannot hold it."""
        path = SHM_DIR / f"{NAME_PREFIX}{epoch:016x}-{attachment_id}-{lane}"
        # The file first has a hidden name that nobody looks for, so that it is locked before it can be found.
        hidden = path.with_name(f".{path.name}")
        file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file, 0, num_bytes)
            hidden.rename(path)
        except OSError as error:
            os.close(file)
            hidden.unlink()
            space = os.statvfs(SHM_DIR)
            raise CapacityError(
                f"data region needs {num_bytes} bytes of shared memory, "
                f"{SHM_DIR} has {space.f_bavail * space.f_frsize} free ({error.strerror})"
            ) from error
        region = cls(path, file, num_bytes, is_owner=True)
        region.words[_EPOCH] = epoch
        region.words[_ATTACHMENT] = attachment_id
        region.words[_OWNER] = _process_word(os.getpid())
        return region

    @classmethod
    def open(cls, name: str, num_bytes: int, epoch: int, attachment_id: int) -> Self:
        """Maps the peer's region; raises `StaleEpoch` when its epoch or attachment is not the expected one."""
        path = SHM_DIR / name
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise StaleEpoch(f"shared-memory region {path} of epoch {epoch:016x} does not exist") from error
        found_bytes = os.fstat(file).st_size
        if found_bytes != num_bytes:
            os.close(file)
            raise PeerError(f"shared-memory region {path} has {found_bytes} bytes, {num_bytes} expected")
        region = cls(path, file, num_bytes, is_owner=False)
        found = (region.words[_EPOCH], region.words[_ATTACHMENT])
        if found != (epoch, attachment_id):
            region.close()
            raise StaleEpoch(
                f"region {path} is of epoch {found[0]:016x}, attachment {found[1]}; "
                f"expected epoch {epoch:016x}, attachment {attachment_id}"
            )
        region.words[_PEER] = _process_word(os.getpid())
        return region

    @property
    def name(self) -> str:
        """What the peer passes to `open`."""
        return self._path.name

    @property
    def is_aborted(self) -> bool:
        """Whether this region, or one that it is tied to, is aborted or doomed. A closed one counts as aborted."""
        try:  # in a loop of its own: waits look here all the time
            for words in (self.words, *self._tied_words):
                if words[ABORT_WORD] or words[_DOOMED]:
                    return True
        except ValueError:  # released
            return True
        return False

    @property
    def is_of_hidden_process(self) -> bool:
        """Whether this process cannot see the creator, which is in a container with process ids of its own."""
        return self.words[_OWNER] >> 32 != _pid_namespace()

    @property
    def is_owner_ending(self) -> bool:
        """Whether the creator is being killed, or has ended. Of a hidden process nothing is known."""
        return not self.is_of_hidden_process and is_ending(self.words[_OWNER] & _PID)

    def tie(self, names: Iterable[str]) -> None:
        """Makes this region and the named ones share their fate; called once, before anything waits in them.

        From then on this end also sees the marks and errors of the others. Raises `StaleEpoch` if one does not exist.
        """
        for name in names:
            try:
                self._tied_words.append(self._tied.enter_context(_header_of(SHM_DIR / name)))
            except FileNotFoundError as error:
                raise StaleEpoch(f"shared-memory region {SHM_DIR / name} does not exist") from error
        number = secrets.randbits(64) | 1
        for words in (self.words, *self._tied_words):
            words[_TIE] = number

    def add_errors(self, count: int) -> None:
        """Adds `count` to the error counter. Only the attention worker may call it: the sum is not atomic."""
        self.words[_NUM_ERRORS] += count

    @property
    def num_errors(self) -> int:
        """The error counter; the largest one of all regions that this end is tied to."""
        return max(words[_NUM_ERRORS] for words in (self.words, *self._tied_words))

    def abort(self) -> None:
        """Dooms all tied regions and sets the abort mark. Both stay: the next attachment gets a new region.

        May be called from any thread, also after `close`: then it does nothing, since nobody waits any more.
        """
        with contextlib.suppress(ValueError):  # released
            _abort(self.words)

    def close(self) -> None:
        """Unmaps the memory at once, even if an exception still refers to it. The owner also removes the file.

        Tensors over it must not be used afterwards.
        """
        self.words.release()
        self._tied.close()
        if self._is_owner:
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        with contextlib.suppress(BufferError):  # a tensor over the memory still exists: the mapping ends with it
            self.memory.close()


class RegionChannel:
    """The part of a `Channel` that one region's header is, wherever its tensors lie."""

    lost_caches = ()

    def __init__(self, region: SharedRegion) -> None:
        self._region = region
        self.is_waiting = False

    @property
    def handle(self) -> bytes:
        """What the peer passes to `map`."""
        return self._region.name.encode()

    def begin_step(self, step_id: int, num_rows: int) -> None:
        """Nothing: all rows are of one attention worker."""

    def begin_layers(self, num_rows: int) -> None:
        """Nothing: qkv is written where it is read."""

    def check(self) -> None:
        """Raises `ChannelAborted` if the region carries the abort mark. Does not wait for a device."""
        if self._region.is_aborted:
            raise ChannelAborted("the peer went away in the middle of a step")

    def add_errors(self, count: int) -> None:
        """Adds `count` to the error counter in the region's header, in host memory."""
        self._region.add_errors(count)

    @property
    def num_errors(self) -> int:
        """The error counter in the region's header."""
        return self._region.num_errors

    def tie(self, handles: Iterable[bytes]) -> None:
        """Ties the region to those of other ranks."""
        self._region.tie(handle.decode() for handle in handles)


def shared_memory_id() -> str:
    """Equal in processes that see the same /dev/shm: of one machine, and of containers that share it."""
    found = SHM_DIR.stat()
    return f"{_BOOT_ID.read_text().strip()}:{found.st_dev}:{found.st_ino}"


def abort_regions_of(pid: int) -> None:
    """Sets the abort mark of each region that the process `pid` has created or mapped. It has died.

    For a third process, in the same container: if both have died, nobody else ends the waits that they have left on a
    GPU.
    """
    process = _process_word(pid)
    for _, words in _headers():
        if process in (words[_OWNER], words[_PEER]):
            _abort(words)


def remove_stale_regions() -> list[str]:
    """Removes regions and sockets whose creator is dead and returns their names.

    Each region is aborted before: another launcher's, which has not seen the death yet, will not find it.
    """
    removed = []
    for path in SHM_DIR.glob(f"{NAME_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError, ValueError), _header_of(path) as words:  # just removed, or cut short
                _abort(words)
            path.unlink(missing_ok=True)  # its creator, or another cleanup, may have removed it already
            removed.append(path.name)
        except BlockingIOError:
            pass  # its creator lives
        finally:
            os.close(file)
    for path in SHM_DIR.glob(f"{NAME_PREFIX}*{LINK_SUFFIX}"):  # they have no lock, but exist beside a region only
        if not path.with_name(f"{path.name.removesuffix(LINK_SUFFIX)}-{FIRST_LANE}").exists():
            with contextlib.suppress(OSError):  # another user's, or just removed
                path.unlink()
                removed.append(path.name)
    return removed


def unread_flags_of(pid: int) -> dict[str, list[int]]:
    """The flags that are set in the regions that the process `pid` has created or mapped, by the names of the regions.

    For a third process, as above. They tell which of two workers has not read what the other one has set. Flags that
    kernels poll are in a GPU's memory, and not among them.
    """
    process, found = _process_word(pid), dict[str, list[int]]()
    for name, words in _headers():
        if process in (words[_OWNER], words[_PEER]):
            found[name] = [flag for flag in range(NUM_FLAGS) if words[flag_word(flag)]]
    return found


def _abort(words: memoryview) -> None:
    if number := words[_TIE]:
        for _, each in _headers():
            if each[_TIE] == number:
                each[_DOOMED] = 1
    words[ABORT_WORD] = 1


def _headers() -> Iterator[tuple[str, memoryview]]:
    """Those of all regions of this user, with their names, each mapped until the next one is asked for."""
    for path in SHM_DIR.glob(f"{NAME_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError), _header_of(path) as words:  # not a region, or just removed
            yield path.name, words


@contextlib.contextmanager
def _header_of(path: Path) -> Iterator[memoryview]:
    file = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(file, HEADER_BYTES) as memory, memoryview(memory) as view, view.cast("Q") as words:
            yield words
    finally:
        os.close(file)


def _process_word(pid: int) -> int:
    """A process of this process's container: in two containers, different processes can have the same id."""
    return _pid_namespace() << 32 | pid


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def flag_word(flag: int) -> int:
    """Index of a flag in `words`. Each flag has a cache line of its own."""
    return _FIRST_FLAG + flag * WORDS_PER_LINE
