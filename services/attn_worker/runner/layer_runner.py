"""Runs an attention backend through the layers of a step, with a handoff before and after each layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch

from services.attn_worker.cache.block_storage import BlockCopies
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers import AttentionBackend
from services.channel import Channel, Flag, qkv_flag
from services.common.attention.learned import Learned

# Stores the extra rows of a step, before its layers, in models that have any. Raises the errors of `Channel.wait`.
TakeExtraRows = Callable[[StepMetadata, Channel], None]


class RunningStep:
    """A step whose layers have been launched."""

    def is_done(self) -> bool:
        """Whether the step has ended. Raises `ChannelAborted` if it was aborted."""
        return True

    def drop(self) -> None:
        """Forgets what is left of a step that has been aborted."""


class FinishedStep(RunningStep):
    """It ended before `launch` returned, or has no layers to run."""


class LayerRunner:
    """Runs the steps of each lane in the order of their launches."""

    def attach(self, channels: Iterable[Channel], learned: Learned) -> None:
        """Makes later steps run on these channels only, and with these values. No step may be running."""
        raise NotImplementedError

    def fence(self) -> torch.cuda.Event | None:
        """The end of all steps launched so far; None: they have ended."""
        return None

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies blocks after all steps launched so far, before the next."""
        raise NotImplementedError

    def launch(self, step: StepMetadata, channel: Channel, after: Collection[RunningStep] = ()) -> RunningStep:
        """Runs or enqueues a step on its lane's channel. May raise the errors of `Channel.wait`.

        `after`: earlier steps, also of other lanes, that must have ended before it begins
        """
        raise NotImplementedError

    def rehearse(self, step: StepMetadata, channel: Channel) -> None:
        """Prepares a step that is not launched. No step is under way."""

    def advance(self) -> bool:
        """Goes on with launched steps that run on the engine thread beside its calls. Returns whether any is left.

        May raise the errors of `Channel.wait`.
        """
        return False

    def capture_ahead(self) -> bool:
        """Prepares one kind of later steps, in a moment in which nobody waits. False: nothing is left to prepare."""
        return False


class EagerLayerRunner(LayerRunner):
    """For backends that act at once, as on a CPU. A launched step has ended."""

    def __init__(
        self,
        backend: AttentionBackend,
        num_layers: int,
        take_extra_rows: TakeExtraRows | None,
    ) -> None:
        self._backend = backend
        self._num_layers = num_layers
        self._take_extra_rows = take_extra_rows

    def attach(self, channels: Iterable[Channel], learned: Learned) -> None:
        """Passes the values on."""
        self._backend.use_learned(learned)

    @torch.inference_mode()
    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies at once."""
        self._backend.storage.copy_blocks(copies)

    @torch.inference_mode()
    def launch(self, step: StepMetadata, channel: Channel, after: Collection[RunningStep] = ()) -> RunningStep:
        """Runs all layers before it returns."""
        num_tokens = step.num_rows
        if self._take_extra_rows is not None:
            self._take_extra_rows(step, channel)
        self._backend.begin_step(step)
        run_layers(self._backend, channel, range(self._num_layers), num_tokens)
        return FinishedStep()


def run_layers(backend: AttentionBackend, channel: Channel, layers: range, num_tokens: int) -> None:
    """Per layer: waits for qkv, calls the backend, and signals its output."""
    qkv, attn_out, qkv_ready = channel.qkv[:num_tokens], channel.attn_out[:num_tokens], qkv_flag(num_tokens)
    for layer in layers:
        channel.wait(qkv_ready)
        backend.forward(layer, qkv, attn_out)
        channel.signal(Flag.ATTENTION_READY)
