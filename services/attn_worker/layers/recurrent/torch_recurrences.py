"""Recurrent layers in plain torch operations: the default on a CPU and the reference for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import softplus

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.state_group import StateWave, StepStates
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers.recurrent.gated_delta import convolve, rule_inputs, run_chunks, run_token
from services.attn_worker.layers.recurrent.state_space import run_state_space
from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.channel import Channel, rows_of_layer
from services.common.attention.learned import Learned
from services.common.families.shape import GatedDelta, SelectiveScan, ShortConvolution, StateSpace


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parts of a wave with equally many tokens, which run together."""

    rows: torch.Tensor  # int64 [num_seqs, num_tokens], of the step
    sources: torch.Tensor  # int64 [num_seqs]
    targets: torch.Tensor  # int64 [num_seqs]


class TorchRecurrences:
    """`OtherLayers` with a recurrence, for any torch device, in float32, bfloat16 or float16.

    One token of a sequence is a step of the recurrence; more of them run in chunks.
    """

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        """Raises CapacityError if memory is too small."""
        self._sizes = spec.recurrences
        self._device = device
        self._storage = StateStorage(spec, device)
        self._batches: list[_Batch] = []

    def use_learned(self, learned: Learned) -> None:
        """Sets the weights of all layers, for later steps."""
        self._storage.use_weights(learned.recurrences)

    def take_extra_rows(self, step: StepMetadata, channel: Channel) -> None:
        """A step has none."""

    def begin_step(self, step: StepMetadata) -> None:
        """Collects the parts of each wave that have equally many tokens."""
        self._batches = [batch for wave in step.of(StepStates).waves for batch in self._prepare(wave)]

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Convolves, and runs the recurrence from the states of the step's sources to those of its targets.

        qkv: [num_tokens, widest row], of which `Recurrence.row_size` are the layer's; not modified.
        out: [num_tokens, widest row], of which `Recurrence.value_size` are written in place.
        """
        sizes, storage = self._sizes[layer], self._storage
        qkv, out = rows_of_layer(qkv, sizes.row_size), rows_of_layer(out, sizes.value_size)
        matrices, past_rows = storage.matrices[layer], storage.past_rows[layer]
        for batch in self._batches:
            rows, state = qkv[batch.rows], matrices[batch.sources]
            if isinstance(sizes, SelectiveScan):
                output, state = run_selective_scan(rows, state, storage.a_logs[layer], storage.d[layer], sizes)
                matrices[batch.targets] = state
                out[batch.rows] = output.to(out.dtype)
                continue
            convolved, past = convolve(
                rows[..., : sizes.conv_dim],
                past_rows[batch.sources],
                storage.conv[layer],
                storage.conv_bias.get(layer),
                is_activated=not isinstance(sizes, ShortConvolution) or sizes.is_activated,
            )
            match sizes:
                case GatedDelta():
                    inputs = rule_inputs(rows, convolved, storage.a_log[layer], storage.dt_bias[layer], sizes)
                    run = run_token if rows.shape[1] == 1 else run_chunks
                    values, state = run(inputs, state)
                    output = values.transpose(1, 2).flatten(2)
                case StateSpace():
                    of_heads = (each[layer] for each in (storage.a_log, storage.dt_bias, storage.d))
                    values, state = run_state_space(rows, convolved, state, *of_heads, sizes)
                    output = values.transpose(1, 2).flatten(2)
                case ShortConvolution():
                    output = convolved
            matrices[batch.targets], past_rows[batch.targets] = state, past
            out[batch.rows] = output.to(out.dtype)

    def _prepare(self, wave: StateWave) -> list[_Batch]:
        by_length: dict[int, list[tuple[int, int, int]]] = {}
        parts = zip(wave.first_rows, wave.num_tokens, wave.sources, wave.targets, strict=True)
        for first_row, num_tokens, source, target in parts:
            by_length.setdefault(num_tokens, []).append((first_row, source, target))
        batches = []
        for num_tokens, group in by_length.items():
            first_rows, sources, targets = torch.tensor(group, device=self._device).unbind(1)
            rows = first_rows[:, None] + torch.arange(num_tokens, device=self._device)
            batches.append(_Batch(rows, sources, targets))
        return batches


def run_selective_scan(
    rows: torch.Tensor,  # [n, num_tokens, row_size], of the seam
    state: torch.Tensor,  # float32 [n, num_channels, state_size]; not modified
    a_logs: torch.Tensor,  # float32 [num_channels, state_size]
    d: torch.Tensor,  # float32 [num_channels]
    sizes: SelectiveScan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of tokens of each sequence, one by one -> the output, [n, num_tokens, num_channels], and the state.

    The recurrence of Mamba 1 (arXiv:2312.00752, section 3), all in float32. It keeps a vector for each channel. A token
    with inputs x, time steps t, keys B and queries C makes each of them s = exp(-exp(a_logs) t) s + t x B; then the
    channel's output is s C + d x.
    """
    widths = (sizes.num_channels, sizes.state_size, sizes.state_size, sizes.num_channels)
    x, keys, queries, time_steps = rows.float().split(widths, dim=-1)
    time_steps = softplus(time_steps)
    inputs, rates, outputs = time_steps * x, -a_logs.exp(), []
    for token in range(rows.shape[1]):
        decay = (time_steps[:, token, :, None] * rates).exp_()
        state = decay * state + inputs[:, token, :, None] * keys[:, token, None, :]
        outputs.append((state @ queries[:, token, :, None]).squeeze(-1))
    return torch.stack(outputs, dim=1) + d * x, state
