"""`SourceStorage`: keys and values of encoders' outputs, in slots. A backend owns one."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from services.attn_worker.cache.source_group import StepSources
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import StepMetadata
from services.channel import Channel, Flag, qkv_flag, rows_of_layer
from services.common.encoders.source_pieces import SourcePiece, source_pieces
from services.common.errors import CapacityError


class SourceStorage:
    """One tensor for each layer with cross attention; everything is zero at first.

    Besides the slots of the KV cache there is the null slot (see `StepSources`).
    """

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        """Raises CapacityError if memory is too small."""
        assert spec.source_slots is not None, "some layers have cross attention"
        num_slots, length = spec.source_slots.num_slots + 1, spec.source_slots.max_source_len
        # By layer, in the order in which they are written: [num_slots, max_source_len, 2, num_kv_heads, head_dim], keys
        # and values.
        self.layers: dict[int, torch.Tensor] = {}
        try:
            for layer, heads in spec.cross_layers.items():
                shape = (num_slots, length, 2, heads.num_kv_heads, heads.head_dim)
                self.layers[layer] = _zeros(shape, spec.dtype, device)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
            num_bytes = num_slots * spec.source_bytes
            raise CapacityError(
                f"{num_slots} outputs of encoders need {num_bytes} bytes on {device}: {error}"
            ) from error

    def take(self, step: StepMetadata, channel: Channel) -> None:
        """Stores what a step writes of encoders' outputs: for each part of their rows, by layer.

        Raises the errors of `Channel.wait`.
        """
        writes = step.of(StepSources).writes
        slots = [slot for slot, _ in writes]
        for pieces in source_pieces([length for _, length in writes], len(channel.qkv)):
            num_rows = sum(piece.num_rows for piece in pieces)
            for layer in self.layers:
                channel.wait(qkv_flag(num_rows))
                self.write(layer, channel.qkv[:num_rows], pieces, slots)
                channel.signal(Flag.ATTENTION_READY)

    def write(self, layer: int, rows: torch.Tensor, pieces: Sequence[SourcePiece], slots: Sequence[int]) -> None:
        """rows: of the seam, [n, widest layer], with the keys and values of the pieces, one after the other.

        slots: by index of a piece
        """
        storage, start = self.layers[layer], 0
        rows = rows_of_layer(rows, math.prod(storage.shape[2:]))
        for index, first, num_rows in pieces:
            place = storage[slots[index], first : first + num_rows]
            torch.nan_to_num(rows[start : start + num_rows].view(place.shape), 0.0, 0.0, 0.0, out=place)
            start += num_rows


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system gives zeros when they are first used: writing them would delay a restart.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
