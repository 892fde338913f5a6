"""Reads a tensor that a client has saved with `torch.save`. The file may be anything; nothing in it is executed.

The file is a zip archive with a pickle and the tensor's values. `torch.load(weights_only=True)` executes no code, but
it takes all memory that a few bytes ask for: by a compressed entry, or by `bytearray(10**11)`. So the archive is
checked and written anew before. All elements of the tensor may share one value: check its shape before copying it.
"""

from __future__ import annotations

import io
import pickletools
import zipfile

import torch

from services.common.errors import InvalidRequest
from services.common.shorten import show

MAX_ENTRIES = 64  # of the archive; torch writes seven
MAX_PICKLE_BYTES = 4096  # torch writes 200
_ENTRY_MARK = b"PK\1\2"  # of an entry in the archive's directory
_ALLOWED_GLOBALS = {
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch FloatStorage",
    "torch HalfStorage",
    "torch BFloat16Storage",
    "collections OrderedDict",
}
_REFUSED_OPCODES = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "BUILD"}


def read_saved_tensor(data: bytes, name: str) -> torch.Tensor:
    """The dense tensor of a file, of float32, float16 or bfloat16 and any shape and strides. Call it in a thread.

    Raises `InvalidRequest`, which calls the file `name`. Takes at most three times the memory of `data`.
    """
    try:
        tensor = torch.load(_checked(data, name), map_location="cpu", weights_only=True)
    except InvalidRequest:
        raise
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidRequest(f"{name} is not a tensor that torch.save has written: {reason[:200]}", name) from error
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(f"{name} has a {type(tensor).__name__}, expected a tensor", name)
    return tensor.detach()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The values, row after row."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _checked(data: bytes, name: str) -> io.BytesIO:
    """The archive with the same entries, as Python reads them: torch cannot see others."""
    if not data.startswith(b"PK\3\4"):
        raise InvalidRequest(f"{name} is no file of torch.save: it is not a zip archive (torch's legacy format?)", name)
    if (num_entries := data.count(_ENTRY_MARK)) > MAX_ENTRIES:
        raise InvalidRequest(f"{name} is an archive of {num_entries} entries, at most {MAX_ENTRIES} allowed", name)
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(written, "w") as copy:
        entries = archive.infolist()
        num_bytes = sum(entry.file_size for entry in entries)
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or num_bytes > len(data):
            raise InvalidRequest(
                f"{name} is an archive of {len(data)} bytes with {num_bytes} in its entries: it must not be compressed",
                name,
            )
        if len({entry.filename for entry in entries}) < len(entries):
            raise InvalidRequest(f"{name} is an archive with two entries of one name", name)
        for entry in entries:
            content = archive.read(entry)
            if entry.filename.endswith(".pkl"):
                _check_pickle(content, name)
            copy.writestr(entry.filename, content)
    written.seek(0)
    return written


def _check_pickle(content: bytes, name: str) -> None:
    if len(content) > MAX_PICKLE_BYTES:
        raise InvalidRequest(f"{name} has a pickle of {len(content)} bytes, at most {MAX_PICKLE_BYTES} allowed", name)
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _REFUSED_OPCODES or (opcode.name == "GLOBAL" and argument not in _ALLOWED_GLOBALS):
            what = show(argument) if opcode.name == "GLOBAL" else opcode.name
            raise InvalidRequest(
                f"{name} has a pickle with {what}: only a dense tensor of float32, float16 or bfloat16 is read", name
            )
