"""Loads Medusa heads from safetensors, in the layouts of FasterDecoding and of vLLM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from services.common.config import SchedulerSection
from services.common.errors import ModelError
from services.common.gpu import naming_what_needs_memory
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel
from services.dense_worker.features.drafting.medusa.heads import MedusaHeads, ResidualBlocks
from services.dense_worker.features.drafting.medusa.heads_config import MAX_HEADS, HeadsConfig, read_heads_config
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.checkpoint import Checkpoint, checkpoint_files

log = structlog.get_logger()

_FILE = "medusa_lm_head.safetensors"  # of FasterDecoding; vLLM's has the usual name
_PREFIX = "medusa_heads."  # of all names in some checkpoints for vLLM


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a checkpoint names its tensors; `head` and `block` count from 0."""

    example: str
    any_tensor: re.Pattern[str]  # the first group is the head
    linear: str
    lm_head: str

    def linear_name(self, head: int, block: int, kind: str) -> str:
        return self.linear.format(head=head, block=block, kind=kind)

    def lm_head_name(self, head: int, num_blocks: int) -> str:
        return self.lm_head.format(head=head, num_blocks=num_blocks)


_LAYOUTS = (
    _Layout(
        "0.0.linear.weight",
        re.compile(r"(\d{1,9})\.\d+\.(?:linear\.weight|linear\.bias|weight)"),
        "{head}.{block}.linear.{kind}",
        "{head}.{num_blocks}.weight",
    ),
    _Layout(
        "blocks.0.layers.0.weight",
        re.compile(r"(?:blocks|lm_heads)\.(\d{1,9})\.(?:layers\.\d+\.weight|layers\.\d+\.bias|weight)"),
        "blocks.{head}.layers.{block}.{kind}",
        "lm_heads.{head}.weight",
    ),
)


def load_medusa_heads(section: SchedulerSection, model: ResolvedModel) -> MedusaHeads:
    """The heads of `scheduler.speculation_model`, no more than a sequence may have drafts.

    Raises the errors of `load_heads`, and `CapacityError` if a GPU has no room for them.
    """
    path, most = section.speculation_model, section.num_speculative_tokens
    assert path is not None, "the config has been checked"
    with naming_what_needs_memory("the Medusa heads"):
        heads = load_heads(path, model.config, model.dtype, model.device, most)
    log.info("Medusa heads loaded", path=str(path), num_heads=heads.num_heads, num_speculative_tokens=most)
    return heads


def load_heads(
    path: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device, max_num_heads: int
) -> MedusaHeads:
    """The first heads of the directory `path`, at most `max_num_heads`.

    A checkpoint may hold more heads than its config.json says, as published ones do. Raises `ModelError`, naming value
    and limit, for heads of another model, for tensors that are missing, of a wrong shape or unknown, and for files
    other than safetensors.
    """
    config = read_heads_config(path, model)
    files = [path / _FILE] if (path / _FILE).is_file() else checkpoint_files(path)
    with ExitStack() as opened:
        checkpoint = Checkpoint(files, opened, lambda name: name.removeprefix(_PREFIX))
        layout = _find_layout(path, checkpoint)
        num_stored = _check_names(path, checkpoint, layout, config)
        num_heads, hidden = min(num_stored, max_num_heads), model.hidden_size

        def stack(names: Sequence[str], shape: tuple[int, ...]) -> torch.Tensor:
            stacked = torch.zeros(len(names), *shape, dtype=dtype, device=device)
            for tensor, name in zip(stacked, names, strict=True):
                if name in checkpoint:  # only biases may be missing
                    tensor.copy_(checkpoint.read(name, FLOATS, (shape,)))
            return stacked

        def stack_linear(block: int, kind: str, *shape: int) -> torch.Tensor:
            return stack([layout.linear_name(head, block, kind) for head in range(num_heads)], shape)

        blocks = [
            ResidualBlocks(stack_linear(block, "weight", hidden, hidden), stack_linear(block, "bias", hidden)[:, None])
            for block in range(config.num_blocks)
        ]
        owners = range(1 if config.has_shared_lm_head else num_heads)
        names = [layout.lm_head_name(head, config.num_blocks) for head in owners]
        lm_head = stack(names, (model.vocab_size, hidden)).expand(num_heads, -1, -1)
    return MedusaHeads(blocks, lm_head)


def _find_layout(path: Path, checkpoint: Checkpoint) -> _Layout:
    found = next((layout for layout in _LAYOUTS if layout.example in checkpoint), None)
    if found is None:
        names = ", ".join(sorted(checkpoint.names)[:3])
        supported = " or ".join(layout.example for layout in _LAYOUTS)
        raise ModelError(f"{path} has tensors such as {names}; Medusa heads have {supported}")
    return found


def _check_names(path: Path, checkpoint: Checkpoint, layout: _Layout, config: HeadsConfig) -> int:
    """The number of heads in the checkpoint. Raises ModelError for tensors that are missing or unknown."""
    matches = [layout.any_tensor.fullmatch(name) for name in checkpoint.names]
    num_heads = max(config.num_heads, *(1 + int(match[1]) for match in matches if match is not None))
    if num_heads > MAX_HEADS:
        raise ModelError(f"{path} has {num_heads} Medusa heads, at most {MAX_HEADS} are supported")
    places = [(head, block) for head in range(num_heads) for block in range(config.num_blocks)]
    required = [layout.linear_name(*place, "weight") for place in places]
    lm_heads = [layout.lm_head_name(head, config.num_blocks) for head in range(num_heads)]
    required += lm_heads[:1] if config.has_shared_lm_head else lm_heads
    missing = [name for name in required if name not in checkpoint]
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} tensors of {num_heads} Medusa heads with {config.num_blocks} residual blocks"
            f" each, such as {', '.join(missing[:3])}"
        )
    known = {*required, *lm_heads, *(layout.linear_name(*place, "bias") for place in places)}
    unknown = sorted(set(checkpoint.names) - known)
    if unknown:
        raise ModelError(f"{checkpoint.file_of(unknown[0])} holds {unknown[0]}, for which config.json has no place")
    return num_heads
