"""`StateStorage`: the tensors that hold the states of all slots in gated delta layers. A backend owns one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from services.attn_worker.cache.spec import KVCacheSpec
from services.common.attention.gated_delta import GatedDeltaWeights
from services.common.errors import CapacityError
from services.common.families.shape import GatedDelta


class StateStorage:
    """The matrices, past rows and weights of each gated delta layer; everything is zero at first.

    Besides the slots of the KV cache there are two: the null slot and the zero slot (see `StepStates`).
    """

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        """Raises CapacityError if memory is too small."""
        num_slots = spec.num_state_slots + 2
        # All float32, by layer.
        self.matrices: dict[int, torch.Tensor] = {}  # [num_slots, num_value_heads, key_dim, value_dim]
        self.past_rows: dict[int, torch.Tensor] = {}  # [num_slots, conv_size - 1, conv_dim], before the convolution
        self.conv: dict[int, torch.Tensor] = {}  # [conv_dim, conv_size]
        self.a_log: dict[int, torch.Tensor] = {}  # [num_value_heads]
        self.dt_bias: dict[int, torch.Tensor] = {}  # [num_value_heads]
        try:
            for layer, sizes in spec.gated_delta.items():
                self.matrices[layer] = torch.zeros(num_slots, *matrices_shape(sizes), device=device)
                self.past_rows[layer] = torch.zeros(num_slots, sizes.conv_size - 1, sizes.conv_dim, device=device)
                self.conv[layer] = torch.zeros(sizes.conv_dim, sizes.conv_size, device=device)
                self.a_log[layer] = torch.zeros(sizes.num_value_heads, device=device)
                self.dt_bias[layer] = torch.zeros(sizes.num_value_heads, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, plain RuntimeError from the CPU allocator
            num_bytes = num_slots * spec.state_bytes
            raise CapacityError(f"{num_slots} states need {num_bytes} bytes on {device}: {error}") from error

    def use_weights(self, weights: Mapping[int, GatedDeltaWeights]) -> None:
        """Sets the weights of all layers, in place: captured graphs read them."""
        assert weights.keys() == self.conv.keys(), "`read_gated_delta` refuses this"
        for layer, each in weights.items():
            conv = torch.from_numpy(np.frombuffer(each.conv, "<f4").astype(np.float32))
            self.conv[layer].copy_(conv.view_as(self.conv[layer]))
            self.a_log[layer].copy_(torch.tensor(each.a_log))
            self.dt_bias[layer].copy_(torch.tensor(each.dt_bias))


def matrices_shape(sizes: GatedDelta) -> tuple[int, int, int]:
    """The shape of one layer's matrices in a slot."""
    return sizes.num_value_heads, sizes.key_dim, sizes.value_dim
