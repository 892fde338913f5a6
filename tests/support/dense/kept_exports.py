"""Keeps what tests export and build, because an export takes a second and they need hundreds.

A segment's ONNX graph and TensorRT-RTX's plan are found again by a digest of all that they depend on: the arguments,
the sources of all modules that make them, and the versions of packages. So no process of a run exports what another one
has, and a run after a change elsewhere exports nothing. Tests of the exporter itself call `real_export`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import onnx
import pytest
import tensorrt_rtx_bindings
import torch

from services.common.model_config import ModelConfig
from services.dense_worker.tensorrt import onnx_segments
from services.dense_worker.tensorrt.api import Sizes, TensorRT
from services.dense_worker.tensorrt.files.atomic_file import make_directory, write_atomically
from tests.support.imports import sources_of

DIRECTORY = Path(sys.prefix) / "kept-exports"  # .venv, which `make clean` removes
MAX_UNUSED_S = 24 * 3600.0

real_export = onnx_segments.export_segment
real_build = TensorRT.build


class KeptFiles:
    """Files of one directory by a digest, for any number of processes at once. Nothing older than a day is kept."""

    def __init__(self, directory: Path, *origin: object) -> None:
        """`origin`: what all files depend on."""
        self._directory, self._origin = directory, origin
        make_directory(directory)
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                if time.time() - path.stat().st_mtime > MAX_UNUSED_S:
                    path.unlink()

    def find_or_make(self, make: Callable[[], bytes], *arguments: object) -> bytes:
        """The bytes that `make()` returns, for arguments whose `repr` says all; from an earlier call if there was one.

        If two processes make them at once, both write a whole file.
        """
        path = self._directory / digest(*self._origin, *arguments)
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            data = make()
            write_atomically(path, data)
        return data


def digest(*parts: object) -> str:
    """Of the parts' `repr`, with their borders."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def origin_of(*modules: str) -> str:
    """A digest of these modules, of all that they import, and of the packages that export and build."""
    sources = sources_of(modules)
    contents = [(name, hashlib.sha256(sources[name].read_bytes()).hexdigest()) for name in sorted(sources)]
    return digest(contents, torch.__version__, version("onnx"), tensorrt_rtx_bindings.__version__)


@contextlib.contextmanager
def kept_exports(directory: Path = DIRECTORY) -> Iterator[None]:
    """Lets `export_segment` and the real TensorRT-RTX's `build` return what was made before for the same arguments."""
    graphs = KeptFiles(directory, origin_of(onnx_segments.__name__))
    plans = KeptFiles(directory, origin_of(TensorRT.__module__))

    @functools.cache
    def exported(name: str, config: ModelConfig, dtype: torch.dtype) -> bytes:
        def export() -> bytes:
            return real_export(name, config, dtype).SerializeToString(deterministic=True)

        return graphs.find_or_make(export, name, config, dtype)

    def export_segment(name: str, config: ModelConfig, dtype: torch.dtype) -> onnx.ModelProto:
        return onnx.load_from_string(exported(name, config, dtype))

    def build(
        api: TensorRT, title: str, network: bytes, sizes: Mapping[str, Sizes], dtype: torch.dtype, timing_cache: bytes
    ) -> tuple[bytes, bytes]:
        if not (isinstance(api._trt, ModuleType) and api.is_rtx):  # a stand-in, or one that times its kernels
            return real_build(api, title, network, sizes, dtype, timing_cache)

        def build_plan() -> bytes:
            plan, timings = real_build(api, title, network, sizes, dtype, timing_cache)
            assert timings == b""
            return plan

        return plans.find_or_make(build_plan, api.name, network, sorted(sizes.items()), dtype), b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_segments, "export_segment", export_segment)
        patch.setattr(TensorRT, "build", build)
        yield
