"""`StateStorage`: the tensors that hold the states of all slots in recurrent layers. A backend owns one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from services.attn_worker.cache.spec import KVCacheSpec
from services.common.attention.learned import RecurrenceWeights
from services.common.errors import CapacityError


class StateStorage:
    """The matrices, past rows and weights of each recurrent layer; everything is zero at first.

    Besides the slots of the KV cache there are two: the null slot and the zero slot (see `StepStates`).
    """

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        """Raises CapacityError if memory is too small."""
        num_slots = spec.num_state_slots + 2
        # All float32, by layer.
        self.matrices: dict[int, torch.Tensor] = {}  # [num_slots, *state_shape]
        self.past_rows: dict[int, torch.Tensor] = {}  # [num_slots, conv_size - 1, conv_dim], before the convolution
        self.conv: dict[int, torch.Tensor] = {}  # [conv_dim, conv_size], of layers that have it, as the next ones
        self.conv_bias: dict[int, torch.Tensor] = {}  # [conv_dim]
        self.a_log: dict[int, torch.Tensor] = {}  # [num_heads]
        self.dt_bias: dict[int, torch.Tensor] = {}  # [num_heads]
        self.d: dict[int, torch.Tensor] = {}  # [num_heads], or [num_channels]
        self.a_logs: dict[int, torch.Tensor] = {}  # [num_channels, state_size]
        try:
            for layer, sizes in spec.recurrences.items():
                self.matrices[layer] = torch.zeros(num_slots, *sizes.state_shape, device=device)
                self.past_rows[layer] = torch.zeros(num_slots, sizes.conv_size - 1, sizes.conv_dim, device=device)
                for name, number in sizes.num_weights.items():
                    if number:
                        getattr(self, name)[layer] = torch.zeros(number, device=device)
                if sizes.conv_dim:
                    self.conv[layer] = self.conv[layer].view(sizes.conv_dim, sizes.conv_size)
                if layer in self.a_logs:
                    self.a_logs[layer] = self.a_logs[layer].view(sizes.state_shape)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, plain RuntimeError from the CPU allocator
            num_bytes = num_slots * spec.state_bytes
            raise CapacityError(f"{num_slots} states need {num_bytes} bytes on {device}: {error}") from error

    def use_weights(self, weights: Mapping[int, RecurrenceWeights]) -> None:
        """Sets the weights of all layers, in place: captured graphs read them."""
        assert weights.keys() == self.matrices.keys(), "`read_recurrences` refuses this"
        for name in ("conv", "conv_bias", "a_logs"):
            for layer, place in getattr(self, name).items():
                values = np.frombuffer(getattr(weights[layer], name), "<f4").astype(np.float32)
                place.copy_(torch.from_numpy(values).view_as(place))
        for name in ("a_log", "dt_bias", "d"):
            for layer, place in getattr(self, name).items():
                place.copy_(torch.tensor(getattr(weights[layer], name)))
