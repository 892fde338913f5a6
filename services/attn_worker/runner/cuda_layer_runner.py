"""`CudaLayerRunner`: runs steps of up to some hundred tokens as captured CUDA graphs, others kernel by kernel.

The graphs include the handoffs. The host never waits between layers: the stream does the handoffs (see
`channel/cuda_flags.py`). Runs on the engine thread, on a stream of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch

from services.attn_worker.cache.block_storage import BlockCopies
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers import DECODE_ONLY, CapturableAttention, StepShape
from services.attn_worker.runner.layer_runner import LayerRunner, RunningStep, TakeExtraRows, run_layers
from services.channel import Channel
from services.common.attention.learned import Learned
from services.common.batch_buckets import batch_buckets, bucket_for, chunk_buckets, prompt_buckets
from services.common.cuda_graphs import StepGraphs
from services.common.errors import CapacityError
from services.common.resolve import ResolvedModel

log = structlog.get_logger()


class _Size(NamedTuple):
    """What the graph of a step depends on; see `CapturableAttention`."""

    num_rows: int
    shape: StepShape


class CudaLayerRunner(LayerRunner):
    """With CUDA graphs, which belong to one attachment because they contain its addresses."""

    def __init__(
        self,
        backend: CapturableAttention,
        num_layers: int,
        max_num_seqs: int,
        take_extra_rows: TakeExtraRows | None = None,
        *,
        captures_lazily: bool,
        has_other_lanes: bool = False,
    ) -> None:
        """`has_other_lanes`: for whose steps a capture would wait."""
        self._take_extra_rows = take_extra_rows
        self._captures_lazily, self._has_other_lanes = captures_lazily, has_other_lanes
        self._without_graph = set[_Size]()  # since memory had no room
        self._backend = backend
        self._num_layers = num_layers
        self._max_num_seqs = max_num_seqs
        self._stream = torch.cuda.Stream()
        self._graphs: dict[Channel, StepGraphs[_Size]] = {}

    def attach(self, channels: Iterable[Channel], learned: Learned) -> None:
        """Passes the values on, and leaves the graphs to `capture_ahead`, unless `captures_lazily` is on.

        With other lanes the first attachment captures them now and later ones when steps need them: streams wait for
        these, and kernels are compiled already.
        """
        torch.cuda.set_device(self._stream.device)  # for the engine thread, which would otherwise use the first GPU
        with torch.cuda.stream(self._stream):
            self._backend.use_learned(learned)
        self._graphs.clear()  # frees their memory before the new graphs need it
        self._without_graph.clear()
        for channel in channels:
            self._graphs[channel] = self._make_graphs(channel)
        self._captures_lazily |= self._has_other_lanes

    def capture_ahead(self) -> bool:
        """Captures one graph."""
        return any(graphs.capture_next() for graphs in self._graphs.values())

    def _make_graphs(self, channel: Channel) -> StepGraphs[_Size]:
        backend, layers = self._backend, range(self._num_layers)

        def warm_up(size: _Size) -> None:
            # Does not write to the channel: the dense worker may still be reading the previous step.
            attn_out = torch.empty_like(channel.attn_out[: size.num_rows])
            _run_empty_step(backend, channel.qkv[: size.num_rows], attn_out, size.shape)

        def run(size: _Size) -> None:
            run_layers(backend, channel, layers, size.num_rows)

        graphs = StepGraphs(self._stream, warm_up, run)
        if not self._captures_lazily:
            shapes = backend.captured_shapes
            sizes = (_Size(rows, each) for each in shapes for rows in reversed(self._rows(channel, each)))
            (graphs.capture_all if self._has_other_lanes else graphs.capture_later)(sizes)
        return graphs

    def _rows(self, channel: Channel, shape: StepShape) -> list[int]:
        return _captured_rows(shape, self._max_num_seqs, len(channel.qkv))

    def fence(self) -> torch.cuda.Event:
        """An event on the stream of the steps."""
        return self._stream.record_event()

    @torch.inference_mode()
    def copy_blocks(self, copies: BlockCopies) -> None:
        """Enqueues the copies on the stream of the steps."""
        with torch.cuda.stream(self._stream):
            self._backend.storage.copy_blocks(copies)

    def come_after(self, steps: Iterable[RunningStep]) -> None:
        """Whatever is launched from now on begins when these steps have ended, which may be on other streams."""
        for each in steps:
            if isinstance(each, _Launched):
                self._stream.wait_event(each.event)

    @torch.inference_mode()
    def launch(self, step: StepMetadata, channel: Channel, after: Collection[RunningStep] = ()) -> RunningStep:
        """Enqueues a step: its graph, if there is one. Waits for the device only to capture a graph."""
        shape = self._backend.captured_shape(step)
        with torch.cuda.stream(self._stream):
            if self._take_extra_rows is not None:
                self._take_extra_rows(step, channel)
            size = graph = None
            if shape is not None:
                size = _Size(bucket_for(self._rows(channel, shape), len(step.positions)), shape)
                graph = self._find_graph(channel, size)
            if size is not None and graph is not None:
                self._backend.begin_step(step, size.num_rows, size.shape)
                graph.replay()
            else:
                self._backend.begin_step(step)
                run_layers(self._backend, channel, range(self._num_layers), step.num_rows)
            event = torch.cuda.Event()
            event.record()
        return _Launched(event, channel)

    @torch.inference_mode()
    def rehearse(self, step: StepMetadata, channel: Channel) -> None:
        """Sends what kernels read about a step to where the next step's will be."""
        if (shape := self._backend.captured_shape(step)) is not None:
            with torch.cuda.stream(self._stream):
                num_rows = bucket_for(self._rows(channel, shape), len(step.positions))
                self._backend.begin_step(step, num_rows, shape)

    def _find_graph(self, channel: Channel, size: _Size) -> torch.cuda.CUDAGraph | None:
        """None: memory has no room for it."""
        if size in self._without_graph:
            return None
        try:
            return self._graphs[channel].find(size)
        except CapacityError as error:
            log.warning("no room for the graph of a step", size=str(size), reason=str(error))
            self._without_graph.add(size)
            return None


class _Launched(RunningStep):
    def __init__(self, event: torch.cuda.Event, channel: Channel) -> None:
        self.event = event
        self._channel = channel

    def is_done(self) -> bool:
        if not self.event.query():
            return False
        self._channel.check()
        return True


@contextmanager
def compiling_together() -> Iterator[None]:
    """A context in which no Triton kernel runs. At its end those that were launched are compiled, several at a time.

    It holds for all threads: use it before others launch kernels.
    """
    from triton.runtime import JITFunction

    from services.common.compile_kernels import compiling_together as compiling_all

    run = JITFunction.run

    def compile_only(kernel: JITFunction, *arguments: Any, **options: Any) -> Any:
        return run(kernel, *arguments, **options | {"warmup": True})

    JITFunction.run = compile_only
    try:
        with compiling_all():
            yield
    finally:
        JITFunction.run = run


@torch.inference_mode()
def load_kernels(backend: CapturableAttention, model: ResolvedModel, max_num_seqs: int, max_num_tokens: int) -> None:
    """Compiles and loads the kernels that captured steps launch, and waits for the device.

    `model`: the one that the backend is for; `max_num_seqs` and `max_num_tokens` limit a step. With `max_num_tokens` 0
    only kernels of steps that decode are loaded.
    """
    shapes = backend.captured_shapes if max_num_tokens else [DECODE_ONLY]
    sizes = [_Size(rows, each) for each in shapes for rows in _captured_rows(each, max_num_seqs, max_num_tokens)]
    most = max(size.num_rows for size in sizes)
    qkv = torch.zeros(most, model.config.qkv_size, dtype=model.dtype, device=model.device)
    attn_out = torch.empty(most, model.config.attn_size, dtype=model.dtype, device=model.device)
    for size in sizes:
        _run_empty_step(backend, qkv[: size.num_rows], attn_out[: size.num_rows], size.shape)
    torch.cuda.synchronize()


@functools.cache
def _captured_rows(shape: StepShape, max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """The numbers of rows of which there are graphs of this shape."""
    if shape == DECODE_ONLY:
        return batch_buckets(max_num_seqs)
    return prompt_buckets(max_num_tokens) if shape.has_prompts else chunk_buckets(max_num_tokens)


def _run_empty_step(
    backend: CapturableAttention, qkv: torch.Tensor, attn_out: torch.Tensor, shape: StepShape
) -> None:
    backend.begin_step(_empty_step(), len(qkv), shape)
    for layer in backend.layers_to_compile:
        backend.forward(layer, qkv, attn_out)


def _empty_step() -> StepMetadata:
    """A decode step without sequences: all its rows are padding."""
    int32, int64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
    empty = StepMetadata(
        num_tokens=int32,
        context_lens=int32,
        block_tables=np.zeros((0, 1), np.int32),
        slot_mapping=int64,
        positions=int32,
        rope_lens=int32,
    )
    return replace(empty, windows=empty)
