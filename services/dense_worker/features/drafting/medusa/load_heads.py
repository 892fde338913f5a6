"""Loads Medusa heads: config.json and safetensors, as FasterDecoding and vLLM write them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog
import torch

from services.common.config import SchedulerSection
from services.common.errors import ModelError
from services.common.gpu import naming_what_needs_memory
from services.common.json_files.fields import Fields
from services.common.json_files.read_json import read_json
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel
from services.common.weight_files import checkpoint_files
from services.dense_worker.features.drafting.medusa.heads import MedusaHeads, ResidualBlocks
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.checkpoint import Checkpoint
from services.dense_worker.model.held_weights import HeldWeights
from services.dense_worker.model.weight_memory import Empty
from services.dense_worker.model.weights import heads_hash

log = structlog.get_logger()

MAX_HEADS = 64  # as many as a step may have drafts of a sequence
MAX_BLOCKS = 16  # of one head; published heads have one
_FILE = "medusa_lm_head.safetensors"  # of FasterDecoding; vLLM's has the usual name
_PREFIX = "medusa_heads."  # of all names in some checkpoints for vLLM


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """What config.json says of the heads."""

    num_heads: int
    num_blocks: int  # of each head
    has_shared_lm_head: bool  # whether the first head's lm_head is that of all heads


def read_heads_config(path: Path, model: ModelConfig) -> HeadsConfig:
    """Reads config.json in the directory `path`, with the fields of FasterDecoding or of vLLM.

    Raises `ModelError`, naming value and limit, if it is not one of Medusa heads, or of another model's.
    """
    file = path / "config.json"
    values = read_json(file)
    if values is None:
        raise ModelError(f"{file} is missing")
    fields = Fields(values, str(file))
    heads = fields.first_of("medusa_num_heads", "num_heads")
    blocks = fields.first_of("medusa_num_layers", "num_hidden_layers")
    for name, expected in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        if fields.get(name, expected) != expected:
            raise fields.error(name, fields.get(name), f"the model's is {expected}")
    if fields.get("truncated_vocab_size", model.vocab_size) != model.vocab_size:
        value = fields.get("truncated_vocab_size")
        raise fields.unsupported("truncated_vocab_size", value, f"heads for the whole vocabulary of {model.vocab_size}")
    return HeadsConfig(
        _count(fields, heads, None, MAX_HEADS),
        _count(fields, blocks, 1, MAX_BLOCKS),
        fields.one_of("original_lm_head", (False, True), False),
    )


def _count(fields: Fields, name: str, default: int | None, most: int) -> int:
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise fields.error(name, value, f"expected an integer from 1 to {most}")
    return value


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


@dataclass(frozen=True, slots=True)
class StoredHeads:
    """The first heads of a directory, of which nothing but headers has been read."""

    path: Path
    num_heads: int
    _files: Sequence[Path]
    _layout: _Layout
    _config: HeadsConfig
    _model: ModelConfig
    _dtype: torch.dtype
    _device: torch.device

    @classmethod
    def find(
        cls, path: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device, max_num_heads: int
    ) -> Self:
        """The heads of the directory `path`, at most `max_num_heads`, for a model of this dtype on this device.

        A checkpoint may hold more heads than its config.json says, as published ones do. Raises `ModelError`, naming
        value and limit, for heads of another model, for tensors that are missing or unknown, and for files other than
        safetensors.
        """
        config = read_heads_config(path, model)
        files = [path / _FILE] if (path / _FILE).is_file() else checkpoint_files(path)
        with _open(files) as checkpoint:
            layout = _find_layout(path, checkpoint)
            num_stored = _check_names(path, checkpoint, layout, config)
        return cls(path, min(num_stored, max_num_heads), files, layout, config, model, dtype, device)

    @property
    def digest(self) -> str:
        """Identifies them, see `heads_hash`."""
        return heads_hash(self.path, self._files)

    def empty(self, device: torch.device, empty: Empty | None = None) -> MedusaHeads:
        """The heads, uninitialised. `empty` makes their tensors; None: each one has memory of its own."""
        make: Empty = empty or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
        count, hidden = self.num_heads, self._model.hidden_size
        blocks = [
            ResidualBlocks(
                make((count, hidden, hidden), self._dtype), make((count, hidden), self._dtype)[:, None]
            )
            for _ in range(self._config.num_blocks)
        ]
        lm_head = make((1 if self._config.has_shared_lm_head else count, self._model.vocab_size, hidden), self._dtype)
        return MedusaHeads(blocks, lm_head.expand(count, -1, -1))

    def load(self, empty: Empty | None = None) -> MedusaHeads:
        """The heads, read from their files. `empty` as in the method. Raises `ModelError` for a wrong shape."""
        heads, layout = self.empty(self._device, empty), self._layout
        with _open(self._files) as checkpoint:

            def fill(places: torch.Tensor, names: Sequence[str]) -> None:
                for place, name in zip(places, names, strict=True):
                    if name in checkpoint:  # only biases may be missing
                        place.copy_(checkpoint.read(name, FLOATS, (tuple(place.shape),)))
                    else:
                        place.zero_()

            for index, block in enumerate(heads.blocks):
                for kind, places in (("weight", block.weight), ("bias", block.bias[:, 0])):
                    fill(places, [layout.linear_name(head, index, kind) for head in range(self.num_heads)])
            num_owned = 1 if self._config.has_shared_lm_head else self.num_heads
            names = [layout.lm_head_name(head, self._config.num_blocks) for head in range(num_owned)]
            fill(heads.lm_head[:num_owned], names)
        return heads


def find_medusa_heads(section: SchedulerSection, model: ResolvedModel) -> StoredHeads:
    """The heads of `scheduler.speculation_model`, no more than a sequence may have drafts.

    Raises the errors of `StoredHeads.find`.
    """
    path = section.speculation_model
    assert path is not None, "the config has been checked"
    return StoredHeads.find(path, model.config, model.dtype, model.device, section.num_speculative_tokens)


def load_medusa_heads(stored: StoredHeads, held: HeldWeights[MedusaHeads] | None) -> MedusaHeads:
    """`held`: their memory at the launcher; None: there is no launcher.

    Raises the errors of `StoredHeads.load` and of `HeldWeights.get`, and `CapacityError` if a GPU has no room for them.
    """
    with naming_what_needs_memory("the Medusa heads"):
        heads = stored.load() if held is None else held.get(stored.load)
    log.info("Medusa heads loaded", path=str(stored.path), num_heads=heads.num_heads)
    return heads


@contextmanager
def _open(files: Sequence[Path]) -> Iterator[Checkpoint]:
    with ExitStack() as opened:
        yield Checkpoint(files, opened, lambda name: name.removeprefix(_PREFIX))


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
