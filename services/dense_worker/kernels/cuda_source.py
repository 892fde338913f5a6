"""Kernels in CUDA C++, compiled by NVRTC at the first start and kept in Triton's cache.

For what Triton cannot express: warps of one program with different tasks, and waits between programs.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path

import structlog
import torch
from cuda.bindings import driver, nvrtc
from triton.runtime.cache import get_cache_manager

from services.channel.cuda_flags import check
from services.common.errors import DeviceError

log = structlog.get_logger()

_DIGEST_BYTES = hashlib.sha256().digest_size


class CudaKernel:
    """A kernel of the current device, launched on the current stream before the kernel before it has ended.

    It takes one struct. It waits by `griddepcontrol.wait` before it accesses what other kernels write.
    """

    def __init__(self, binary: bytes, name: str, num_threads: int, shared_bytes: int) -> None:
        """`binary`: of `compiled`. Raises `DeviceError` when it cannot be loaded."""
        self._image = ctypes.create_string_buffer(binary)
        self._module = check(driver.cuModuleLoadData(ctypes.addressof(self._image)))
        self._kernel = check(driver.cuModuleGetFunction(self._module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self._kernel, attribute, shared_bytes))
        self._launch = driver.CUlaunchConfig()
        self._launch.gridDimX = self._launch.gridDimY = self._launch.gridDimZ = 1
        self._launch.blockDimX, self._launch.blockDimY, self._launch.blockDimZ = num_threads, 1, 1
        self._launch.sharedMemBytes = shared_bytes
        overlaps = driver.CUlaunchAttribute()
        overlaps.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlaps.value.programmaticStreamSerializationAllowed = 1
        self._launch.attrs, self._launch.numAttrs = [overlaps], 1

    def __call__(self, num_programs: int, params: ctypes.Structure) -> None:
        """Enqueues the kernel, which gets a copy of `params`."""
        self._launch.gridDimX = num_programs
        self._launch.hStream = torch.cuda.current_stream().cuda_stream
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        check(driver.cuLaunchKernelEx(self._launch, self._kernel, ctypes.addressof(arguments), 0))


def compiled(source: Path, constants: Mapping[str, int], device: torch.device) -> bytes:
    """The binary for a device, from the cache if it is there. Other threads may run meanwhile.

    `constants`: macros of the source. Raises `DeviceError` when it cannot be compiled.
    """
    major, minor = torch.cuda.get_device_capability(device)
    text = source.read_bytes()
    options = [f"--gpu-architecture=sm_{major}{minor}{'a' if major >= 9 else ''}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    try:
        _, *version = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise DeviceError(f"NVRTC cannot be loaded: {error}") from error
    key = hashlib.sha256(repr((text, options, version)).encode()).hexdigest()
    cache, file_name = get_cache_manager(key), f"{source.stem}.kept"
    path = cache.get_file(file_name)
    kept = None if path is None else _read_kept(Path(path))
    if kept is not None:
        return kept
    binary = _compile(text, source.name, options)
    try:
        cache.put(hashlib.sha256(binary).digest() + binary, file_name, binary=True)
    except OSError as error:  # a folder that is full or cannot be written
        log.warning("a compiled kernel is not kept", kernel=source.stem, reason=str(error))
    return binary


def _read_kept(path: Path) -> bytes | None:
    """The binary of a file that begins with its digest; None if it has to be compiled again."""
    try:
        content = path.read_bytes()
        digest, binary = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(binary).digest() == digest:
            return binary
        reason = "it is damaged"
    except OSError as error:
        reason = str(error)
    log.warning("a kept kernel is compiled again", file=str(path), reason=reason)
    return None


def _compile(text: bytes, name: str, options: list[str]) -> bytes:
    """Takes some seconds."""
    program = check(nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], []))
    encoded = [option.encode() for option in options]
    error, *_ = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if int(error) != 0:
        messages = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, messages))
        raise DeviceError(f"{name} cannot be compiled: {messages.decode().strip()}")
    binary = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, binary))
    check(nvrtc.nvrtcDestroyProgram(program))
    return binary
