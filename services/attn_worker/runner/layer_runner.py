"""Drives an attention backend through the layers of a step, meeting the dense worker before and after each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from services.attn_worker.backends import AttentionBackend
from services.attn_worker.runner.step_metadata import StepMetadata
from services.channel import Channel, Flag, qkv_flag


class RunningStep(Protocol):
    """A step whose layers have been launched."""

    def is_done(self) -> bool:
        """Whether all its keys and values are in the cache. Raises `ChannelAborted` if they never will be."""


class FinishedStep:
    """A `RunningStep` that has nothing left to do."""

    def is_done(self) -> bool:
        return True


class LayerRunner(Protocol):
    """Runs steps in the order in which they are launched."""

    def attach(self, channels: Iterable[Channel]) -> None:
        """Steps will run over these channels, and no others, from now on; nothing is running."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks of the KV cache, (from, to) each, after all steps launched before and before the next."""

    def launch(self, step: StepMetadata, channel: Channel) -> RunningStep:
        """Runs a step over its lane's channel, or enqueues it. May raise what `Channel.wait` raises."""


class EagerLayerRunner:
    """A `LayerRunner` for backends that act at once, as on a CPU: a launched step is done."""

    def __init__(self, backend: AttentionBackend, num_layers: int) -> None:
        self._backend = backend
        self._num_layers = num_layers

    def attach(self, channels: Iterable[Channel]) -> None:
        """Does nothing."""

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies at once."""
        self._backend.copy_blocks(copies)

    @torch.inference_mode()
    def launch(self, step: StepMetadata, channel: Channel) -> RunningStep:
        """Runs all layers before it returns."""
        num_tokens = len(step.positions)
        self._backend.begin_step(step)
        run_layers(self._backend, channel, range(self._num_layers), num_tokens)
        return FinishedStep()


def run_layers(backend: AttentionBackend, channel: Channel, layers: range, num_tokens: int) -> None:
    """One handoff, one call of the backend and one handoff back per layer."""
    qkv, attn_out, qkv_ready = channel.qkv[:num_tokens], channel.attn_out[:num_tokens], qkv_flag(num_tokens)
    for layer in layers:
        channel.wait(qkv_ready)
        backend.forward(layer, qkv, attn_out)
        channel.signal(Flag.ATTENTION_READY)
