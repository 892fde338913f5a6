"""The part of `fake_tensorrt.py` for weights that are constants of a plan and get other values after loading."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.support.workers.fake_tensorrt import FakeTensorRT
    from tests.support.workers.fake_tensorrt_runtime import Engine, ILogger


class Weights:
    """Numbers in host memory, which the caller keeps alive: a numpy array or, from 10 on, an address."""

    def __init__(self, *numbers: Any) -> None:
        if len(numbers) == 1:
            assert isinstance(numbers[0], np.ndarray)
            self._array = numbers[0]
            return
        dtype, address, count = numbers
        assert dtype.name == "BF16", "only what numpy lacks needs an address"
        self._array = np.frombuffer((ctypes.c_char * (2 * count)).from_address(address), np.uint16)

    def copied(self) -> np.ndarray:
        """What TensorRT reads now."""
        return self._array.reshape(-1).copy()


class Readers:
    """The layers of a network with what they read, so that an input can be replaced by a constant."""

    def __init__(self, nodes: Any) -> None:
        self._inputs = [[SimpleNamespace(name=name) if name else None for name in node.input] for node in nodes]
        self._before = [list(node.input) for node in nodes]
        self._constants: dict[int, tuple[Weights, Any]] = {}  # by id of the output
        self._names: dict[int, str] = {}  # of weights, by their id

    def of(self, layer: int) -> list[Any]:
        """The tensors that a layer reads; the list may be changed."""
        return self._inputs[layer]

    def add_constant(self, shape: tuple[int, ...], weights: Weights) -> SimpleNamespace:
        """A layer with one output."""
        assert int(np.prod(shape)) == len(weights.copied())
        output = SimpleNamespace(name=f"(Unnamed Layer* {len(self._constants)})_output", shape=shape)
        self._constants[id(output)] = weights, output
        return SimpleNamespace(get_output=[output].__getitem__)

    def set_weights_name(self, weights: Weights, name: str) -> bool:
        """Names weights that a constant already has."""
        assert any(weights is known for known, _ in self._constants.values())
        self._names[id(weights)] = name
        return True

    def check_unread(self, name: str) -> None:
        """TensorRT forbids removing a tensor that a layer reads."""
        assert not any(tensor and tensor.name == name for inputs in self._inputs for tensor in inputs), name

    def named_constants(self) -> dict[str, np.ndarray]:
        """The constants that stand where the ONNX model reads an input of their name."""
        found: dict[str, np.ndarray] = {}
        pairs = zip(itertools.chain(*self._before), itertools.chain(*self._inputs), strict=True)
        for name, tensor in pairs:
            if id(tensor) in self._constants:
                weights = self._constants[id(tensor)][0]
                assert self._names[id(weights)] == name, f"{name} is read where another weight was"
                found[name] = weights.copied()
        return found


class FakeRefitter:
    """Replaces constants of an engine."""

    def __init__(self, trt: FakeTensorRT, engine: Engine, logger: ILogger) -> None:
        self._trt, self._engine, self._logger = trt, engine, logger
        if not engine.is_refittable:
            logger.log(logger.ERROR, "the engine was not built with the REFIT flag")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._new: dict[str, np.ndarray] = {}

    def get_all_weights(self) -> list[str]:
        return list(self._engine.constants)

    def set_named_weights(self, name: str, weights: Weights) -> bool:
        found, expected = weights.copied(), self._engine.constants[name]
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            self._logger.log(self._logger.ERROR, f"{name} has {len(expected)} weights, not {len(found)}")
            return False
        self._new[name] = found
        return True

    def refit_cuda_engine(self) -> bool:
        self._engine.constants |= self._new
        return self._trt.record("refit_cuda_engine", self._engine.title, sorted(self._new))
