"""`TurnLayerRunner`: runs the steps of several lanes by turns on the engine thread, as on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from services.attn_worker.cache.block_storage import BlockCopies
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers import AttentionBackend
from services.attn_worker.runner.layer_runner import LayerRunner, RunningStep
from services.channel import Flag, qkv_flag
from services.channel.turns import Turn, TurnChannel, Turns
from services.common.attention.learned import Learned


class TurnLayerRunner(LayerRunner):
    """For backends that act at once. Each lane has a backend of its own, and all have one storage."""

    def __init__(
        self, backends: Sequence[AttentionBackend], num_layers: int, on_step: Callable[[float, float], None]
    ) -> None:
        """`on_step` gets the duration of each step, and what part of it was spent waiting, in seconds."""
        self._backends = backends
        self._num_layers = num_layers
        self._on_step = on_step
        self._turns = Turns()
        self._backend_of: dict[TurnChannel, AttentionBackend] = {}
        self._copies: list[BlockCopies] = []  # that the next step makes first

    def attach(self, channels: Iterable[TurnChannel], learned: Learned) -> None:
        """Deals the backends to the channels, and passes the values on."""
        for backend in self._backends:
            backend.use_learned(learned)
        self._turns = Turns()
        self._copies.clear()
        self._backend_of = dict(zip(channels, self._backends, strict=True))

    def fence(self) -> None:
        raise AssertionError("`check_lanes` refuses a host tier")

    def copy_blocks(self, copies: BlockCopies) -> None:
        """The next step that is launched makes the copies, before its layers."""
        self._copies.append(copies)

    def launch(self, step: StepMetadata, channel: TurnChannel, after: Collection[RunningStep] = ()) -> RunningStep:
        """Adds a step to those of its lane."""
        copies, self._copies = self._copies, []
        turn = Turn(channel, self._run(step, channel, copies), after)
        self._turns.add(turn)
        return _TurnStep(self._turns, turn)

    @torch.inference_mode()
    def advance(self) -> bool:
        """Runs one layer of a step, or waits a little. Returns whether any step is left."""
        if not self._turns.go_on() and self._turns.has_any:
            self._turns.pause()
        return self._turns.has_any

    def _run(self, step: StepMetadata, channel: TurnChannel, copies: Iterable[BlockCopies]) -> Iterator[Flag]:
        start_s, waited_s = time.perf_counter(), channel.waited_s
        backend, num_tokens = self._backend_of[channel], len(step.positions)
        for each in copies:
            backend.storage.copy_blocks(each)
        backend.begin_step(step)
        qkv, attn_out, qkv_ready = channel.qkv[:num_tokens], channel.attn_out[:num_tokens], qkv_flag(num_tokens)
        for layer in range(self._num_layers):
            yield qkv_ready
            channel.wait(qkv_ready)
            backend.forward(layer, qkv, attn_out)
            channel.signal(Flag.ATTENTION_READY)
        self._on_step(time.perf_counter() - start_s, channel.waited_s - waited_s)


class _TurnStep(RunningStep):
    """Its layers run by turns."""

    def __init__(self, turns: Turns, turn: Turn) -> None:
        self._turns = turns
        self._turn = turn

    def is_done(self) -> bool:
        return self._turn.is_done

    def drop(self) -> None:
        self._turns.remove(self._turn)
