"""`MemoryFile`: bytes that processes of one machine share without sending them, in a file that has no name.

Other processes open it through the file table of the process that made it, which the kernel allows the same user, and
where both see the same process ids. Its memory is free when the last process has closed and unmapped it, however that
process ends: nothing is left after a kill.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref

from services.pb import images_pb2

_LENGTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of linux/fcntl.h, since 5.1: unlike F_SEAL_WRITE it waits for no processor


class MemoryFile:
    """Empty at first. It is closed when nobody refers to it any more."""

    def __init__(self, data: bytes = b"") -> None:
        """Raises `OSError` if there can be no more files."""
        self._file = os.memfd_create("twostroke-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._file)
        os.write(self._file, data)

    @property
    def path(self) -> str:
        """Where other processes find it."""
        return _path(os.getpid(), self._file)

    def seal(self) -> None:
        """Nobody can write to it or change its length from now on."""
        try:
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _LENGTH | _FUTURE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _LENGTH | fcntl.F_SEAL_WRITE)  # an older kernel

    def __len__(self) -> int:
        return os.fstat(self._file).st_size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        return os.pread(self._file, stop - start, start)

    def describe(self) -> images_pb2.MemoryFile:
        """What another process needs to open it."""
        status = os.fstat(self._file)
        return images_pb2.MemoryFile(
            process_id=os.getpid(), descriptor=self._file, inode=status.st_ino, num_bytes=status.st_size
        )


def open_memory_file(message: images_pb2.MemoryFile) -> int:
    """A descriptor of another process's sealed file, which the caller closes.

    Raises `OSError` if this process cannot open it, or if it is no such file.
    """
    path = _path(message.process_id, message.descriptor)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # it may be anything
    status = os.fstat(file)
    try:
        is_same = (status.st_ino, status.st_size) == (message.inode, message.num_bytes)
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        if is_same and seals & _LENGTH == _LENGTH and seals & (_FUTURE_WRITE | fcntl.F_SEAL_WRITE):
            return file
        raise OSError(f"{path} is another file by now, or one that could still change")
    except OSError:
        os.close(file)
        raise


def can_read(message: images_pb2.MemoryFile) -> bool:
    """Whether this process can open the files of another one, of which this is an example."""
    try:
        os.close(open_memory_file(message))
    except OSError:
        return False
    return True


def _path(process_id: int, descriptor: int) -> str:
    return f"/proc/{process_id}/fd/{descriptor}"
