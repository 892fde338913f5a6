"""`BlockStorage`: the tensors that hold the keys and values of all blocks. A backend owns one."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence

import torch

from services.attn_worker.cache.spec import SCALE_DTYPE, KVCacheSpec
from services.common.errors import CapacityError
from services.common.kv_cache.scales import KVScales

BlockCopies = Sequence[Sequence[tuple[int, int]]]  # by group: (from, to) of each

_WORD_BYTES = 8


class BlockStorage:
    """One tensor per layer, with its scales if it has any.

    A block, also the null block, has one index for all layers of a group. Those of one dtype and shape lie in one
    tensor, so that one operation copies a block in all of them. A layer that reads the keys of another one has that
    one's tensor.
    """

    def __init__(
        self, spec: KVCacheSpec, block_shape: Callable[[int], tuple[int, ...]], device: torch.device
    ) -> None:
        """`block_shape` is one of the two methods of the spec. Raises CapacityError if memory is too small.

        Everything is zero at first: even masked elements must be finite.
        """
        layers_of: dict[tuple[int, torch.dtype, tuple[int, ...]], list[int]] = {}
        for layer in spec.storing_layers:
            layers_of.setdefault((spec.group_of(layer), spec.dtype_of(layer), block_shape(layer)), []).append(layer)
        # By group: [layers of one dtype and shape, num_blocks + 1, ...]
        self._tensors: tuple[list[torch.Tensor], ...] = ([], [])
        by_layer: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        try:
            # float32 [num_layers, 4]: the scales of keys and of values of FP8 layers. The rest makes every address a
            # multiple of 16 bytes, so that kernels are not compiled twice.
            self._layer_scales = torch.ones(spec.num_layers, 4, dtype=SCALE_DTYPE, device=device)
            for (group, dtype, shape), layers in layers_of.items():
                size = (len(layers), spec.num_blocks_of(group) + 1, *shape)
                blocks = self._allocate(group, size, dtype, device)
                scales: Sequence[torch.Tensor | None] = [None] * len(layers)
                if dtype == torch.int8:
                    scales = list(self._allocate(group, size[:-1], SCALE_DTYPE, device))
                elif dtype == torch.float8_e4m3fn:
                    scales = [self._layer_scales[layer, :2] for layer in layers]
                by_layer |= zip(layers, zip(blocks, scales, strict=True), strict=True)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
            num_blocks, num_bytes = spec.num_blocks + 1, spec.num_bytes + spec.block_bytes
            raise CapacityError(f"{num_blocks} KV blocks need {num_bytes} bytes on {device}: {error}") from error
        of_layers = [by_layer[spec.kv_layer(layer)] for layer in range(spec.num_layers)]
        self.layers = [blocks for blocks, _ in of_layers]  # [num_blocks + 1, *block_shape(layer)]
        # float32; int8: [num_blocks + 1, *block_shape(layer)[:-1]]; float8_e4m3fn: [2], of keys and values; None: none
        self.scales = [scales for _, scales in of_layers]

    def use_scales(self, scales: KVScales) -> None:
        """Sets the scales of FP8 layers, in place. What was stored with others means something else from now on."""
        self._layer_scales[:, :2].copy_(torch.tensor([scales.keys, scales.values]).T)

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies whole blocks in all layers of their groups, in order."""
        for group, pairs in enumerate(copies):
            for source, target in pairs:
                for tensor in self._tensors[group]:
                    tensor[:, target].copy_(tensor[:, source])

    @property
    def layout(self) -> str:
        """How the tensors of the first group hold a block; equal where the bytes of a block mean the same."""
        return str([(str(tensor.dtype), len(tensor), tuple(tensor.shape[2:])) for tensor in self._tensors[0]])

    @property
    def block_words(self) -> int:
        """Words of 8 bytes of one block of the first group, as `gather_blocks` writes it."""
        return sum(_num_words(tensor) for tensor in self._tensors[0])

    def gather_blocks(self, block_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copies blocks of the first group, all layers of one after the other, with their scales.

        block_ids: int64 [num_blocks]; out: int64 [num_blocks, block_words], contiguous, on the same device.
        """
        for part, blocks in self.parts(out):
            part.copy_(blocks.index_select(1, block_ids).transpose(0, 1))

    def scatter_blocks(self, block_ids: torch.Tensor, words: torch.Tensor) -> None:
        """Writes what `gather_blocks` has copied to different blocks of the first group."""
        for part, blocks in self.parts(words):
            blocks.index_copy_(1, block_ids, part.transpose(0, 1))

    def parts(self, words: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each tensor of the first group: its part of `words`, [num_blocks, num_layers, size], and itself,
        [num_layers, num_blocks + 1, size], both as bytes or, if their size allows it, as words of int64.

        words: int64 [num_blocks, block_words].
        """
        first = 0
        for tensor in self._tensors[0]:
            blocks = tensor.flatten(2).view(torch.uint8)
            num_layers, _, num_bytes = blocks.shape
            part = words[:, first : first + _num_words(tensor)]
            first += _num_words(tensor)
            if num_bytes % _WORD_BYTES:
                part = part.view(torch.uint8)[:, : num_layers * num_bytes]
            else:
                blocks = blocks.view(torch.int64)
            yield part.unflatten(1, (num_layers, -1)), blocks

    def _allocate(
        self, group: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if device.type == "cpu":  # the system gives zeros when they are first used: writing them would delay a restart
            memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            blocks = torch.frombuffer(memory, dtype=dtype).view(shape)
        else:
            blocks = torch.zeros(shape, dtype=dtype, device=device)
        self._tensors[group].append(blocks)
        return blocks


def _num_words(tensor: torch.Tensor) -> int:
    """Words that hold one block of a tensor [num_layers, num_blocks + 1, ...]."""
    num_layers, _, *shape = tensor.shape
    return -(-num_layers * math.prod(shape) * tensor.itemsize // _WORD_BYTES)
