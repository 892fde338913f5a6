"""`EngineContexts`: the execution contexts of one engine, on one block of device memory that the caller owns.

A captured CUDA graph depends on the state of the context that it was captured from, so NVIDIA's documentation asks for
one context per captured graph. Here a context belongs to the graphs of one size, and its shapes never change again.
Such graphs set only addresses anew, which a capture has taken as arguments of its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from services.dense_worker.tensorrt.engine import Engine
from services.dense_worker.tensorrt.gpu import is_capturing

Sizes = tuple[int, ...]  # dimension 0 of each dynamic input


class ShapedContext:
    """An execution context, and the sizes that it is set to."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.sizes: Sizes | None = None  # None: not known

    def set_shapes(self, inputs: Sequence[tuple[str, torch.Tensor]], sizes: Sizes) -> bool:
        """Sets the shapes of the inputs if they differ from the present ones. False if TensorRT refuses one."""
        if self.sizes == sizes:
            return True
        self.sizes = None
        if not all(self.context.set_input_shape(name, tuple(tensor.shape)) for name, tensor in inputs):
            return False
        self.sizes = sizes
        return True


class EngineContexts:
    """Gives a context for each run. Uncaptured runs share one, captured ones have one for each size."""

    def __init__(self, engine: Engine, memory: torch.Tensor, current_stream: Callable[[], int]) -> None:
        """`memory`: uint8, shared by all contexts, which must run one after another on one stream."""
        self._engine, self._memory, self._current_stream = engine, memory, current_stream
        self._captured: dict[Sizes, ShapedContext] = {}
        self._uncaptured: ShapedContext | None = self._create()

    def find(self, sizes: Sizes) -> ShapedContext:
        """The context for a run of these sizes on the current stream.

        While the stream is being captured, the last run must have had these sizes: TensorRT prepares new sizes with
        work that a graph cannot hold.
        """
        if not is_capturing():
            if self._uncaptured is None:
                self._uncaptured = self._create()
            return self._uncaptured
        captured = self._captured.get(sizes)
        if captured is None:
            captured, self._uncaptured = self._uncaptured, None
            assert captured is not None and captured.sizes == sizes, f"sizes {sizes} did not run before their capture"
            self._captured[sizes] = captured
        return captured

    def _create(self) -> ShapedContext:
        return ShapedContext(self._engine.create_context(self._memory, self._current_stream()))
