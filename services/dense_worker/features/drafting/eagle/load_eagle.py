"""Loads an EAGLE-3 head from safetensors, in the layouts of SafeAILab's EAGLE and of vLLM and `speculators`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import structlog
import torch

from services.common.config import SchedulerSection
from services.common.errors import ConfigError, ModelError
from services.common.gpu import naming_what_needs_memory
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel
from services.common.weight_files import checkpoint_files
from services.dense_worker.features.drafting.eagle.eagle_config import NUM_RESIDUALS, EagleConfig, read_eagle_config
from services.dense_worker.features.drafting.eagle.eagle_model import EagleLayer, EagleModel
from services.dense_worker.features.drafting.kv_cache.draft_attention import bytes_of_block
from services.dense_worker.features.drafting.kv_cache.draft_blocks import BLOCK_SIZE
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import RmsNorm
from services.dense_worker.model.checkpoint import Checkpoint, open_checkpoint
from services.dense_worker.model.held_weights import HeldWeights
from services.dense_worker.model.weight_memory import Empty
from services.dense_worker.model.weights import heads_hash
from services.dense_worker.parameters import Parameter

log = structlog.get_logger()

_LAYER, _OTHER_LAYER = "midlayer.", "layers.0."  # how EAGLE names the layer, and how vLLM and `speculators` do
_EMBEDDING, _OFFSETS, _MASK = "embed_tokens.weight", "d2t", "t2d"
_FC, _LM_HEAD, _FINAL_NORM = "fc.weight", "lm_head.weight", "norm.weight"
_EMBEDDING_NORM, _HIDDEN_NORM = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
_QKV = tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")
_O, _MLP_NORM = "midlayer.self_attn.o_proj.weight", "midlayer.post_attention_layernorm.weight"
_GATE_UP, _DOWN = ("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"), "midlayer.mlp.down_proj.weight"
_INTEGERS, _BOOLS = ("I64", "I32"), ("BOOL", "U8")


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head whose embedding may be the served model's."""

    config: EagleConfig
    layer: EagleLayer
    has_embedding: bool  # otherwise `layer` has an empty one

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of its own."""
        for field in fields(self.layer):
            part = getattr(self.layer, field.name)
            if isinstance(part, RmsNorm):
                yield field.name, part.weight.data
            elif isinstance(part, torch.Tensor) and part.numel():
                yield field.name, part

    def with_embedding(self, embedding: torch.Tensor) -> EagleLayer:
        """The layer with its own embedding, or with this one, the served model's [vocab, hidden]."""
        return self.layer if self.has_embedding else replace(self.layer, embedding=embedding)

    def without_same_ids(self) -> LoadedHead:
        """The head without its token ids, if each of them is that of the served model. Waits for the device."""
        ids, size = self.layer.target_ids, self.config.layer.vocab_size
        if ids is None or len(ids) != size or not torch.equal(ids, torch.arange(size, device=ids.device)):
            return self
        return replace(self, layer=replace(self.layer, target_ids=None))


@dataclass(frozen=True, slots=True)
class StoredHead:
    """The head in a directory, of which nothing but headers has been read."""

    path: Path
    _config: EagleConfig
    _has_embedding: bool
    _has_target_ids: bool
    _dtype: torch.dtype
    _device: torch.device

    @classmethod
    def find(cls, path: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Self:
        """The head in the directory `path`, for a model of this dtype on this device.

        Raises `ModelError`, naming tensor, value and limit, for heads of another model, for tensors that are missing or
        unknown, and for files other than safetensors.
        """
        config = read_eagle_config(path, model)
        with open_checkpoint(path, _canonical) as checkpoint:
            _check_names(path, checkpoint, config)
            return cls(path, config, _EMBEDDING in checkpoint, _OFFSETS in checkpoint, dtype, device)

    @property
    def digest(self) -> str:
        """Identifies it, see `heads_hash`."""
        return heads_hash(self.path, checkpoint_files(self.path))

    def empty(self, device: torch.device, empty: Empty | None = None) -> LoadedHead:
        """The head, uninitialised. `empty` makes its tensors; None: each one has memory of its own."""
        make: Empty = empty or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
        config, sizes, shapes = self._config, self._config.layer, _shapes(self._config)

        def rows(*names: str) -> torch.Tensor:
            """Room for these tensors, one below the other."""
            return make((sum(shapes[name][0] for name in names), *shapes[names[0]][1:]), self._dtype)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(Parameter(name, rows(name)), sizes.norm_eps)

        no_rows = torch.empty(0, sizes.hidden_size, dtype=self._dtype, device=device)
        layer = EagleLayer(
            embedding=rows(_EMBEDDING) if self._has_embedding else no_rows,
            fc=rows(_FC),
            embedding_norm=norm(_EMBEDDING_NORM),
            hidden_norm=norm(_HIDDEN_NORM),
            qkv=rows(*_QKV),
            o=rows(_O),
            mlp_norm=norm(_MLP_NORM),
            gate_up=rows(*_GATE_UP),
            down=rows(_DOWN),
            final_norm=norm(_FINAL_NORM),
            lm_head=rows(_LM_HEAD),
            target_ids=make((config.draft_vocab_size,), torch.int64) if self._has_target_ids else None,
            activation=sizes.parts.activation,
            norm_before_residual=config.norm_before_residual,
        )
        return LoadedHead(config, layer, self._has_embedding)

    def load(self, empty: Empty | None = None) -> LoadedHead:
        """The head, read from its files. `empty` as in the method.

        Raises `ModelError` for tensors of a wrong shape, and for token ids that the model does not have.
        """
        head, shapes = self.empty(self._device, empty), _shapes(self._config)
        layer = head.layer
        with open_checkpoint(self.path, _canonical) as checkpoint:

            def fill(place: torch.Tensor, *names: str) -> None:
                for part, name in zip(place.split([shapes[name][0] for name in names]), names, strict=True):
                    part.copy_(checkpoint.read(name, FLOATS, (shapes[name],)))

            if self._has_embedding:
                fill(layer.embedding, _EMBEDDING)
            fill(layer.fc, _FC)
            fill(layer.embedding_norm.weight.data, _EMBEDDING_NORM)
            fill(layer.hidden_norm.weight.data, _HIDDEN_NORM)
            fill(layer.qkv, *_QKV)
            fill(layer.o, _O)
            fill(layer.mlp_norm.weight.data, _MLP_NORM)
            fill(layer.gate_up, *_GATE_UP)
            fill(layer.down, _DOWN)
            fill(layer.final_norm.weight.data, _FINAL_NORM)
            fill(layer.lm_head, _LM_HEAD)
            target_ids = _read_target_ids(checkpoint, self._config)
        if layer.target_ids is not None and target_ids is not None:
            layer.target_ids.copy_(target_ids)
        return head


def find_eagle_head(section: SchedulerSection, model: ResolvedModel) -> StoredHead:
    """The head of `scheduler.speculation_model`. Raises the errors of `StoredHead.find`."""
    path = section.speculation_model
    assert path is not None, "the config has been checked"
    return StoredHead.find(path, model.config, model.dtype, model.device)


def load_eagle_head(stored: StoredHead, held: HeldWeights[LoadedHead] | None) -> LoadedHead:
    """`held`: its memory at the launcher; None: there is no launcher.

    Raises the errors of `StoredHead.load` and of `HeldWeights.get`, and `CapacityError` if a GPU has no room for it.
    """
    with naming_what_needs_memory("the EAGLE-3 head"):
        head = stored.load() if held is None else held.get(stored.load)
    return head.without_same_ids()


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


def _canonical(name: str) -> str:
    return _LAYER + name.removeprefix(_OTHER_LAYER) if name.startswith(_OTHER_LAYER) else name


def _shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that a head may have, except those of its token ids."""
    sizes = config.layer
    hidden, intermediate = sizes.hidden_size, sizes.intermediate_size
    q, k, v = _QKV
    return {
        _FC: (hidden, NUM_RESIDUALS * hidden),
        _EMBEDDING_NORM: (hidden,),
        _HIDDEN_NORM: (hidden,),
        q: (sizes.q_size, 2 * hidden),
        k: (sizes.kv_size, 2 * hidden),
        v: (sizes.kv_size, 2 * hidden),
        _O: (hidden, sizes.q_size),
        _MLP_NORM: (hidden,),
        **dict.fromkeys(_GATE_UP, (intermediate, hidden)),
        _DOWN: (hidden, intermediate),
        _FINAL_NORM: (hidden,),
        _LM_HEAD: (config.draft_vocab_size, hidden),
        _EMBEDDING: (sizes.vocab_size, hidden),
    }


def _check_names(path: Path, checkpoint: Checkpoint, config: EagleConfig) -> None:
    """Raises ModelError for tensors that are missing or unknown."""
    required = [name for name in _shapes(config) if name != _EMBEDDING]
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


def _read_target_ids(checkpoint: Checkpoint, config: EagleConfig) -> torch.Tensor | None:
    """The served model's id of each token of the head: its own id plus an offset. None: they are the same."""
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
    return target_ids
