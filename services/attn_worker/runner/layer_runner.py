"""Runs an attention backend through the layers of a step, with a handoff before and after each layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from services.attn_worker.layers import AttentionBackend, RecurrentAttention, SourceAttention
from services.attn_worker.runner.step_metadata import StepMetadata
from services.channel import Channel, Flag, qkv_flag
from services.common.attention.recurrence_weights import RecurrenceWeights
from services.common.kv_cache.scales import KVScales
from services.step.sources import source_pieces


class RunningStep(Protocol):
    """A step whose layers have been launched."""

    def is_done(self) -> bool:
        """Whether the step has ended. Raises `ChannelAborted` if it was aborted."""

    def drop(self) -> None:
        """Forgets what is left of a step that has been aborted."""


class FinishedStep:
    """A `RunningStep` that has ended."""

    def is_done(self) -> bool:
        return True

    def drop(self) -> None:
        pass


class LayerRunner(Protocol):
    """Runs the steps of each lane in the order of their launches."""

    def attach(
        self,
        channels: Iterable[Channel],
        scales: KVScales,
        sinks: Sequence[Sequence[float]],
        recurrences: Mapping[int, RecurrenceWeights],
        relative_bias: Sequence[Sequence[float]] = (),
    ) -> None:
        """Makes later steps run on these channels only, with these scales of FP8 layers and these learned sinks.

        `sinks` are [num_layers][num_heads], `recurrences` the weights of such layers, and `relative_bias` is
        [num_buckets][num_heads]; they are empty for a model without them. No step may be running.
        """

    def fence(self) -> torch.cuda.Event | None:
        """The end of all steps launched so far; None: they have ended."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]], group: int = 0) -> None:
        """Copies blocks of a group of layers, given as (from, to), after all steps launched so far, before the next."""

    def launch(self, step: StepMetadata, channel: Channel, after: Collection[RunningStep] = ()) -> RunningStep:
        """Runs or enqueues a step on its lane's channel. May raise the errors of `Channel.wait`.

        `after`: earlier steps, also of other lanes, that must have ended before it begins
        """

    def advance(self) -> bool:
        """Goes on with launched steps that run on the engine thread beside its calls. Returns whether any is left.

        May raise the errors of `Channel.wait`.
        """


class EagerLayerRunner:
    """A `LayerRunner` for backends that act at once, as on a CPU. A launched step has ended."""

    def __init__(self, backend: AttentionBackend | RecurrentAttention | SourceAttention, num_layers: int) -> None:
        self._backend = backend
        self._num_layers = num_layers

    def attach(
        self,
        channels: Iterable[Channel],
        scales: KVScales,
        sinks: Sequence[Sequence[float]],
        recurrences: Mapping[int, RecurrenceWeights],
        relative_bias: Sequence[Sequence[float]] = (),
    ) -> None:
        """Passes scales, sinks and weights on."""
        self._backend.use_scales(scales)
        if sinks:
            self._backend.use_sinks(sinks)
        if recurrences:
            self._backend.use_recurrences(recurrences)
        if relative_bias:
            self._backend.use_relative_bias(relative_bias)

    def fence(self) -> None:
        """None: a launched step has ended."""

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[tuple[int, int]], group: int = 0) -> None:
        """Copies at once."""
        self._backend.copy_blocks(copies, group)

    @torch.inference_mode()
    def launch(self, step: StepMetadata, channel: Channel, after: Collection[RunningStep] = ()) -> RunningStep:
        """Runs all layers before it returns."""
        num_tokens = len(step.positions)
        store_sources(self._backend, channel, step)
        self._backend.begin_step(step)
        run_layers(self._backend, channel, range(self._num_layers), num_tokens)
        return FinishedStep()

    def advance(self) -> bool:
        """No step is left."""
        return False


def run_layers(backend: AttentionBackend, channel: Channel, layers: range, num_tokens: int) -> None:
    """Per layer: waits for qkv, calls the backend, and signals its output."""
    qkv, attn_out, qkv_ready = channel.qkv[:num_tokens], channel.attn_out[:num_tokens], qkv_flag(num_tokens)
    for layer in layers:
        channel.wait(qkv_ready)
        backend.forward(layer, qkv, attn_out)
        channel.signal(Flag.ATTENTION_READY)


def store_sources(backend: SourceAttention, channel: Channel, step: StepMetadata) -> None:
    """Stores what the step writes of encoders' outputs: for each part of their rows, per layer with cross attention."""
    if step.sources is None or not step.sources.writes:
        return
    slots = [slot for slot, _ in step.sources.writes]
    for pieces in source_pieces([length for _, length in step.sources.writes], len(channel.qkv)):
        num_rows = sum(piece.num_rows for piece in pieces)
        for layer in backend.cross_layers:
            channel.wait(qkv_flag(num_rows))
            backend.store_source(layer, channel.qkv[:num_rows], pieces, slots)
            channel.signal(Flag.ATTENTION_READY)
