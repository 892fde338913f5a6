"""Loads an EAGLE-3 head from safetensors, in the layouts of SafeAILab's EAGLE and of vLLM and `speculators`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from services.common.config import SchedulerSection
from services.common.errors import ConfigError, ModelError
from services.common.gpu import naming_what_needs_memory
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel
from services.dense_worker.features.drafting.eagle.eagle_config import NUM_RESIDUALS, EagleConfig, read_eagle_config
from services.dense_worker.features.drafting.eagle.eagle_layer import EagleLayer
from services.dense_worker.features.drafting.eagle.eagle_model import EagleModel
from services.dense_worker.features.drafting.kv_cache.draft_attention import bytes_of_block
from services.dense_worker.features.drafting.kv_cache.draft_blocks import BLOCK_SIZE
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.model.checkpoint import Checkpoint, open_checkpoint
from services.dense_worker.parameters import Parameter

log = structlog.get_logger()

_LAYER, _OTHER_LAYER = "midlayer.", "layers.0."  # how EAGLE names the layer, and how vLLM and `speculators` do
_EMBEDDING, _OFFSETS, _MASK = "embed_tokens.weight", "d2t", "t2d"
_INTEGERS, _BOOLS = ("I64", "I32"), ("BOOL", "U8")


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head whose embedding may be the served model's."""

    config: EagleConfig
    layer: EagleLayer
    has_embedding: bool  # otherwise `layer` has an empty one

    def with_embedding(self, embedding: torch.Tensor) -> EagleLayer:
        """The layer with its own embedding, or with this one, the served model's [vocab, hidden]."""
        return self.layer if self.has_embedding else replace(self.layer, embedding=embedding)


def load_eagle_head(section: SchedulerSection, model: ResolvedModel) -> LoadedHead:
    """The head of `scheduler.speculation_model`.

    Raises the errors of `load_eagle`, and `CapacityError` if a GPU has no room for it.
    """
    path = section.speculation_model
    assert path is not None, "the config has been checked"
    with naming_what_needs_memory("the EAGLE-3 head"):
        return load_eagle(path, model.config, model.dtype, model.device)


def make_eagle_model(
    head: LoadedHead, embedding: torch.Tensor, section: SchedulerSection, model: ResolvedModel
) -> EagleModel:
    """The head with its cache. embedding: the served model's [vocab, hidden], for a head that has none.

    Raises `ConfigError` if `scheduler.draft_cache_bytes` is too small.
    """
    max_len = model.max_model_len
    block_bytes = bytes_of_block(head.config.layer, model.dtype)
    num_blocks = min(section.draft_cache_bytes // block_bytes, 1 + section.max_num_seqs * -(-max_len // BLOCK_SIZE))
    if num_blocks < 2:
        raise ConfigError(
            f"scheduler.draft_cache_bytes is {section.draft_cache_bytes}, the EAGLE-3 head needs at least "
            f"{2 * block_bytes}, for two blocks of {BLOCK_SIZE} tokens"
        )
    log.info(
        "EAGLE-3 head loaded",
        path=str(section.speculation_model),
        residual_layers=head.config.residual_layers,
        draft_vocab_size=head.config.draft_vocab_size,
        num_cached_tokens=(num_blocks - 1) * BLOCK_SIZE,
    )
    return EagleModel(head.config, head.with_embedding(embedding), num_blocks, max_len)


def load_eagle(path: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadedHead:
    """The head in the directory `path`.

    Raises `ModelError`, naming tensor, value and limit, for heads of another model, for tensors that are missing, of a
    wrong shape or unknown, for token ids that the model does not have, and for files other than safetensors.
    """
    config = read_eagle_config(path, model)
    with open_checkpoint(path, _canonical) as checkpoint:
        return _read(path, checkpoint, config, dtype, device)


def _canonical(name: str) -> str:
    return _LAYER + name.removeprefix(_OTHER_LAYER) if name.startswith(_OTHER_LAYER) else name


def _read(
    path: Path, checkpoint: Checkpoint, config: EagleConfig, dtype: torch.dtype, device: torch.device
) -> LoadedHead:
    sizes = config.layer
    hidden, intermediate = sizes.hidden_size, sizes.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, NUM_RESIDUALS * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (sizes.q_size, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (sizes.kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (sizes.kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, sizes.q_size),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (intermediate, hidden),
        "midlayer.mlp.up_proj.weight": (intermediate, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, intermediate),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    _check_names(path, checkpoint, config, shapes)

    def read(*names: str) -> torch.Tensor:
        """The rows of these tensors, one below the other."""
        parts = [checkpoint.read(name, FLOATS, (shapes[name],)) for name in names]
        joined = torch.empty(sum(map(len, parts)), *shapes[names[0]][1:], dtype=dtype, device=device)
        for place, part in zip(joined.split([len(part) for part in parts]), parts, strict=True):
            place.copy_(part)
        return joined

    def norm(name: str) -> RmsNorm:
        return RmsNorm(Parameter(name, read(name)), sizes.norm_eps)

    has_embedding = _EMBEDDING in checkpoint
    if has_embedding:
        shapes[_EMBEDDING] = (sizes.vocab_size, hidden)
    layer = EagleLayer(
        embedding=read(_EMBEDDING) if has_embedding else torch.empty(0, hidden, dtype=dtype, device=device),
        fc=read("fc.weight"),
        embedding_norm=norm("midlayer.input_layernorm.weight"),
        hidden_norm=norm("midlayer.hidden_norm.weight"),
        qkv=read(*(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")),
        o=read("midlayer.self_attn.o_proj.weight"),
        mlp_norm=norm("midlayer.post_attention_layernorm.weight"),
        gate_up=read("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"),
        down=read("midlayer.mlp.down_proj.weight"),
        final_norm=norm("norm.weight"),
        lm_head=read("lm_head.weight"),
        target_ids=_read_target_ids(checkpoint, config, device),
        activation=sizes.parts.activation,
        norm_before_residual=config.norm_before_residual,
    )
    return LoadedHead(config, layer, has_embedding)


def _check_names(path: Path, checkpoint: Checkpoint, config: EagleConfig, required: Sequence[str]) -> None:
    """Raises ModelError for tensors that are missing or unknown."""
    is_part = config.draft_vocab_size < config.layer.vocab_size
    missing = [name for name in (*required, *((_OFFSETS,) if is_part else ())) if name not in checkpoint]
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} tensors of an EAGLE-3 head, such as {', '.join(missing[:3])}"
            f" ({_LAYER} may be {_OTHER_LAYER})"
        )
    unknown = sorted(set(checkpoint.names) - {*required, _EMBEDDING, _OFFSETS, _MASK})
    if unknown:
        raise ModelError(f"{checkpoint.file_of(unknown[0])} holds {unknown[0]}, for which an EAGLE-3 head has no place")


def _read_target_ids(checkpoint: Checkpoint, config: EagleConfig, device: torch.device) -> torch.Tensor | None:
    """The served model's id of each token of the head: its own id plus an offset. None: all are the same."""
    size, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    if _MASK in checkpoint:  # says the same once more
        checkpoint.read(_MASK, _BOOLS, ((vocab_size,),))
    if _OFFSETS not in checkpoint:
        return None
    target_ids = torch.arange(size) + checkpoint.read(_OFFSETS, _INTEGERS, ((size,),)).long()
    file = checkpoint.file_of(_OFFSETS)
    bad = torch.nonzero((target_ids < 0) | (target_ids >= vocab_size)).flatten()
    if len(bad):
        token = int(bad[0])
        raise ModelError(
            f"{_OFFSETS} in {file} makes token {token} of the head token {int(target_ids[token])} of the model, whose"
            f" vocabulary has {vocab_size}"
        )
    found, counts = target_ids.unique(return_counts=True)
    if len(found) < size:
        token = int(found[counts > 1][0])
        raise ModelError(f"{_OFFSETS} in {file} makes several tokens of the head token {token} of the model")
    return None if size == vocab_size and bool((target_ids == torch.arange(size)).all()) else target_ids.to(device)
