"""Recurrent layers on CUDA: prepares each wave of a step for the kernels of the convolution and the recurrence.

In gated delta layers and those of Mamba 2 parts of many tokens go through the recurrence in chunks, others token by
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.state_group import StateWave, StepStates, null_slot, zero_slot
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers.recurrent.gated_delta import CHUNK_SIZE
from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.attn_worker.layers.recurrent.triton_gated_delta import run_parts
from services.attn_worker.layers.recurrent.triton_gated_delta_chunks import CHUNK_FIELDS, ChunkTiles, run_chunked_parts
from services.attn_worker.layers.recurrent.triton_gated_delta_convolution import (
    ITEM_TOKENS,
    Convolved,
    convolve_items,
)
from services.attn_worker.layers.recurrent.triton_parts import ITEM_FIELDS, PART_FIELDS
from services.attn_worker.layers.recurrent.triton_selective_scan import run_scan_parts
from services.attn_worker.layers.recurrent.triton_state_space import (
    convolve_channels,
    run_chunked_state_space,
    run_state_space_parts,
)
from services.attn_worker.layers.step_upload import StepUpload
from services.channel import Channel, rows_of_layer
from services.common.attention.learned import Learned
from services.common.errors import CapacityError
from services.common.families.shape import GatedDelta, Recurrence, SelectiveScan, ShortConvolution, StateSpace

MIN_CHUNKED_TOKENS = 32  # of a part; from here on chunks are faster on an H200, see bench/results/gated.md
_MAX_NUM_WAVES = 3  # a step makes at most two checkpoints within a sequence's tokens


@dataclass(frozen=True, slots=True)
class _Wave:
    """A wave on the device."""

    items: torch.Tensor  # int32 [num_items, ITEM_FIELDS], of all parts
    short_parts: torch.Tensor  # int32 [num_short_parts, PART_FIELDS], with padding
    long_parts: torch.Tensor  # int32 [num_long_parts, PART_FIELDS]
    chunks: torch.Tensor  # int32 [num_chunks, CHUNK_FIELDS], of the long parts


class TritonRecurrences:
    """`CapturableLayers` with a recurrence, in float32, bfloat16 or float16; a wave is two to four launches per layer.

    The launches of a step without prompts depend on its padded number of sequences alone, so they can be captured.
    """

    captures_chunks = False

    def __init__(
        self,
        spec: KVCacheSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
    ) -> None:
        """`max_num_seqs` and `max_num_tokens` limit a step. Raises CapacityError if memory is too small."""
        self._sizes = spec.recurrences
        self.layers_to_compile: Sequence[int] = list({sizes: layer for layer, sizes in self._sizes.items()}.values())
        self._max_num_seqs, self._max_num_tokens = max_num_seqs, max_num_tokens
        self._storage = StateStorage(spec, device)
        self._padding = (0, zero_slot(spec.num_state_slots), null_slot(spec.num_state_slots))
        max_num_parts = _MAX_NUM_WAVES * max_num_seqs
        max_num_items = max_num_parts + max_num_tokens // ITEM_TOKENS
        max_num_chunks = max_num_parts + max_num_tokens // CHUNK_SIZE
        max_num_entries = max_num_parts * PART_FIELDS + max_num_items * ITEM_FIELDS + max_num_chunks * CHUNK_FIELDS
        try:
            # By sizes, which usually are the same in all layers.
            self._convolved: dict[Recurrence, Convolved | torch.Tensor] = {}
            self._tiles: dict[GatedDelta, ChunkTiles] = {}
            for sizes in set(self._sizes.values()):
                rows = torch.empty(max_num_tokens, sizes.conv_dim, dtype=dtype, device=device)
                self._convolved[sizes] = rows
                if isinstance(sizes, GatedDelta):
                    norms = torch.empty(max_num_tokens, 2 * sizes.num_key_heads, device=device)
                    gates = torch.empty(max_num_tokens, 2 * sizes.num_value_heads, device=device)
                    self._convolved[sizes] = Convolved(rows, norms, gates)
                    self._tiles[sizes] = ChunkTiles.empty(max_num_tokens, sizes, device)
            self._upload = StepUpload(max_num_entries, device)
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            raise CapacityError(
                f"the rows of {max_num_tokens} tokens do not fit on {device} beside {spec.num_state_slots} states:"
                f" {error}"
            ) from error
        self._waves: list[_Wave] = []
        if device.type == "cuda":  # so that no request waits for the compiler
            self._compile(dtype, device)

    def use_learned(self, learned: Learned) -> None:
        """Sets the weights of all layers, in place: captured graphs read them."""
        self._storage.use_weights(learned.recurrences)

    def take_extra_rows(self, step: StepMetadata, channel: Channel) -> None:
        """A step has none."""

    def begin_step(self, step: StepMetadata, padded_num_rows: int | None = None) -> None:
        """Sends the step's waves to the device.

        padded_num_rows: for steps without prompts, the number of parts; the output of rows beyond the step's becomes
        zero. None: no padding. Raises CapacityError for more sequences or tokens than the backend was created for.
        """
        self._begin(step.of(StepStates), padded_num_rows)

    def _begin(self, states: StepStates, padded_num_seqs: int | None) -> None:
        first = states.waves[0]
        num_seqs = padded_num_seqs or len(first.targets)
        num_tokens = sum(sum(wave.num_tokens) for wave in states.waves)
        if num_seqs > self._max_num_seqs or num_tokens > self._max_num_tokens:
            raise CapacityError(
                f"a step has {num_seqs} sequences and {num_tokens} tokens, recurrent layers were made for"
                f" {self._max_num_seqs} and {self._max_num_tokens}"
            )
        assert padded_num_seqs is None or (len(states.waves) == 1 and len(first.targets) <= num_seqs)
        self._upload.begin()
        self._waves = [self._send(_parts(wave, padded_num_seqs, self._padding)) for wave in states.waves]
        self._upload.send()

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Launches the waves of one layer. `qkv` and `out` may have more rows than the step."""
        sizes = self._sizes[layer]
        convolved = self._convolved[sizes]
        qkv, out = rows_of_layer(qkv, sizes.row_size), rows_of_layer(out, sizes.value_size)
        if isinstance(sizes, ShortConvolution):
            for wave in self._waves:
                convolve_channels(qkv, out, wave.items, self._storage, layer, sizes)
            return
        if isinstance(sizes, SelectiveScan):
            for wave in self._waves:
                for parts in (wave.short_parts, wave.long_parts):
                    if len(parts):
                        run_scan_parts(qkv, out, parts, self._storage, layer, sizes)
            return
        if isinstance(sizes, StateSpace):
            for wave in self._waves:
                convolve_channels(qkv, convolved, wave.items, self._storage, layer, sizes)
                if len(wave.short_parts):
                    run_state_space_parts(qkv, convolved, out, wave.short_parts, self._storage, layer, sizes)
                if len(wave.long_parts):
                    run_chunked_state_space(qkv, convolved, out, wave.long_parts, self._storage, layer, sizes)
            return
        for wave in self._waves:
            convolve_items(qkv, convolved, wave.items, self._storage, layer, sizes)
            if len(wave.short_parts):
                run_parts(convolved, out, wave.short_parts, self._storage, layer, sizes)
            if len(wave.long_parts):
                parts, chunks = wave.long_parts, wave.chunks
                run_chunked_parts(convolved, self._tiles[sizes], out, parts, chunks, self._storage, layer, sizes)

    def _send(self, parts: np.ndarray) -> _Wave:
        """Puts a wave into the step's upload. Without prompts each part is one item."""
        is_long = parts[:, 1] >= MIN_CHUNKED_TOKENS
        on_device = []
        for array in (items_of(parts), parts[~is_long], parts[is_long], chunks_of(parts[is_long])):
            host, tensor = self._upload.reserve(array.shape)
            host[...] = array
            on_device.append(tensor)
        return _Wave(*on_device)

    def _compile(self, dtype: torch.dtype, device: torch.device) -> None:
        """Runs a step of padding, and one of a prompt, in a layer of each kind."""
        num_rows, prompt = min(MIN_CHUNKED_TOKENS, self._max_num_tokens), StateWave()
        prompt.add(0, num_rows, *self._padding[1:])  # its state is for nobody
        for wave, padded_num_seqs in ((StateWave(), 1), (prompt, None)):
            self._begin(StepStates((wave,)), padded_num_seqs)
            for layer in self.layers_to_compile:
                sizes = self._sizes[layer]
                qkv = torch.zeros(num_rows, sizes.row_size, dtype=dtype, device=device)
                self.forward(layer, qkv, torch.empty(num_rows, sizes.value_size, dtype=dtype, device=device))
        torch.cuda.synchronize(device)  # steps run on another stream


def _parts(wave: StateWave, padded_num_seqs: int | None, padding: tuple[int, int, int]) -> np.ndarray:
    """int32 [num_parts, PART_FIELDS], those of the wave and then padding."""
    num_parts = len(wave.targets)
    parts = np.empty((padded_num_seqs or num_parts, PART_FIELDS), np.int32)
    parts[:num_parts] = np.array((wave.first_rows, wave.num_tokens, wave.sources, wave.targets), np.int32).T
    parts[num_parts:, 0] = range(num_parts, len(parts))
    parts[num_parts:, 1:] = padding
    return parts


def items_of(parts: np.ndarray) -> np.ndarray:
    """int32 [num_items, ITEM_FIELDS]: each part in pieces of at most ITEM_TOKENS tokens, or one without tokens."""
    index, starts, ends = _pieces(parts[:, 1], ITEM_TOKENS)
    items = np.empty((len(index), ITEM_FIELDS), np.int32)
    items[:, :PART_FIELDS] = parts[index]
    items[:, 4], items[:, 5] = starts, ends
    return items


def chunks_of(parts: np.ndarray) -> np.ndarray:
    """int32 [num_chunks, CHUNK_FIELDS], of parts with tokens."""
    index, starts, ends = _pieces(parts[:, 1], CHUNK_SIZE)
    return np.stack((parts[index, 0] + starts, ends - starts), axis=1)


def _pieces(num_tokens: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of pieces of at most `most` tokens, at least one of each part: the part, the first token in it, and the end."""
    counts = np.maximum(1, -(-num_tokens // most))
    index = np.repeat(np.arange(len(num_tokens)), counts)
    starts = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    return index, starts, np.minimum(starts + most, num_tokens[index])
