"""`Checkpoint`: the safetensors files of a Hugging Face directory, one file or sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import ModelError
from services.common.weight_files import checkpoint_files
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.parameters import TensorPart


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """Some rows of a matrix in a stack of matrices."""

    matrix: int
    rows: slice  # with both ends given
    is_transposed: bool  # in the file

    def shape_in(self, stack: tuple[int, ...]) -> tuple[int, int]:
        """Their shape in a stack of the given shape."""
        return self.rows.stop - self.rows.start, stack[1 if self.is_transposed else 2]

    def of(self, stack: Any, part: TensorPart | None) -> torch.Tensor:
        """They themselves, or a part of them, of what is indexed like a stack of matrices."""
        rows, columns = (None, None) if part is None else (*part.dims, None)[:2]
        first = self.rows.start
        rows = tuple((first + each, first + end) for each, end in rows or ((0, self.rows.stop - first),))
        dims = (columns, rows) if self.is_transposed else (rows, columns)
        [matrix] = TensorPart((((self.matrix, self.matrix + 1),), *dims)).of(stack)
        return matrix.t() if self.is_transposed else matrix


class Checkpoint:
    """Open files. Tensors are mapped, and read when they are used. Every error is a ModelError that names the file.

    `canonical` gives the name by which a tensor is asked for.
    """

    def __init__(self, files: Sequence[Path], opened: ExitStack, canonical: Callable[[str], str]) -> None:
        self._files: dict[str, tuple[Path, Any, str]] = {}  # file, handle and stored name, by canonical name
        self._parts: dict[str, MatrixRows] = {}
        for file in files:
            with _naming(file):
                handle = opened.enter_context(safe_open(file, framework="pt"))
                names = handle.keys()
                self._files |= {canonical(name): (file, handle, name) for name in names}

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors."""
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._files[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        file, handle, stored_name = self._files[name]
        with _naming(file):
            stored = tuple(handle.get_slice(stored_name).get_shape())
        return self._parts[name].shape_in(stored) if name in self._parts else stored

    def split(self, name: str, parts: Mapping[str, MatrixRows]) -> None:
        """Gives the parts of a stack of matrices, [n, rows, features], names of their own in place of its name."""
        stored = self._files.pop(name)
        self._files |= dict.fromkeys(parts, stored)
        self._parts |= parts

    def tensor(self, name: str, part: TensorPart | None = None) -> torch.Tensor:
        """A tensor of any type and shape, or a part of it, on the CPU."""
        file, handle, stored_name = self._files[name]
        with _naming(file):
            if name in self._parts:
                return self._parts[name].of(handle.get_slice(stored_name), part)
            return handle.get_tensor(stored_name) if part is None else part.of(handle.get_slice(stored_name))

    def read(
        self,
        name: str,
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        part: TensorPart | None = None,
    ) -> torch.Tensor:
        """A tensor, or a part of it, on the CPU.

        The type and shape of the whole tensor must be among those given, which is checked before it is read.
        """
        self.check(name, dtypes, shapes)
        return self.tensor(name, part)

    def read_numbers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor that the model needs, as float32 on the CPU. Raises ModelError if not all numbers are finite."""
        if name not in self:
            raise ModelError(f"the checkpoint lacks {name}, which its config.json calls for")
        tensor = self.read(name, FLOATS, (shape,)).float()
        if not tensor.isfinite().all():
            value = tensor[~tensor.isfinite()][0].item()
            raise ModelError(f"{name} in {self.file_of(name)} has {value}, expected finite numbers")
        return tensor

    def check(self, name: str, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        """Raises ModelError if a tensor's type or shape is not among those given."""
        file, handle, stored_name = self._files[name]
        shape = self.shape(name)
        if shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ModelError(f"{name} in {file} has shape {shape}, config.json calls for {expected}")
        with _naming(file):
            dtype = handle.get_slice(stored_name).get_dtype()
        if dtype not in dtypes:
            raise ModelError(f"{name} in {file} has dtype {dtype}, supported: {', '.join(dtypes)}")


@contextmanager
def open_checkpoint(path: Path, canonical: Callable[[str], str]) -> Iterator[Checkpoint]:
    """Opens the files of the directory `path`. Raises ModelError for one that is missing, truncated or damaged."""
    files = checkpoint_files(path)
    with ExitStack() as opened:
        yield Checkpoint(files, opened, canonical)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is missing, truncated or damaged: {error}") from error
