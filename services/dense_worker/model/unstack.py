"""Checkpoints that may have all experts of a layer in one tensor, or each for itself: both look like the latter."""

from __future__ import annotations

from services.common.families.names import names_of
from services.common.model_config import ModelConfig
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.checkpoint import Checkpoint


def unstack_experts(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Gives the parts of stacked experts the names of single ones, in families whose files have either form.

    A stack has gates and ups in one tensor, [num_experts, 2 * size, hidden], and downs in another. Raises ModelError
    for a stack of another shape, or a quantized one.
    """
    page, experts = names_of(config), config.parts.experts
    names = page.of_experts
    if experts is None or not names.stacked_gate_up:
        return
    count, size, hidden = experts.num_experts, experts.intermediate_size, config.hidden_size
    for layer in experts.layers:
        module = f"{page.layers}.{layer}.{names.experts}"
        stacks = {
            names.stacked_gate_up: {names.gate: slice(0, size), names.up: slice(size, 2 * size)},
            names.stacked_down: {names.down: slice(0, hidden)},
        }
        for stacked, rows_of in stacks.items():
            name = f"{module}.{stacked}"
            if name in checkpoint:
                shape = (count, 2 * size, hidden) if stacked == names.stacked_gate_up else (count, hidden, size)
                checkpoint.check(name, FLOATS, (shape,))
                checkpoint.split(
                    name,
                    {
                        f"{module}.{expert}.{own}.weight": (expert, rows)
                        for expert in range(count)
                        for own, rows in rows_of.items()
                    },
                )
