"""The protocols between the attention worker's engine and the kernels that run a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import StepMetadata
from services.common.attention.learned import Learned
from services.common.batch_buckets import MAX_CAPTURED_CHUNK_ROWS
from services.common.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class BackendSetup:
    """What a backend is made for."""

    config: ModelConfig
    spec: KVCacheSpec
    dtype: torch.dtype  # of the model
    device: torch.device
    max_model_len: int  # tokens of the longest sequence
    max_num_seqs: int = 1024  # of a step; this and the next matter on a GPU
    max_num_tokens: int = 8192
    storage: BlockStorage | None = None  # that of another lane, whose cache it shares; None: it makes one


class AttentionBackend(Protocol):
    """RoPE, paged KV cache and attention on one device; called by the engine thread alone.

    The backend owns the KV cache. Tensors have the model's dtype and are on the backend's device. Callers hold
    `torch.inference_mode`.
    """

    @property
    def storage(self) -> BlockStorage:
        """The blocks of all layers with attention."""
        ...

    def use_learned(self, learned: Learned) -> None:
        """Sets what the model has of it, for later steps: in place, where captured graphs read it."""
        ...

    def begin_step(self, step: StepMetadata) -> None:
        """Prepares the data that all layers of a step share."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Rotates, appends to the cache and attends, for the rows of the step that began last.

        qkv: [num_tokens, qkv_size], heads of q, then k, then v, if there are any; not modified.
        out: [num_tokens, attn_size], written in place.
        """
        ...


class StepShape(NamedTuple):
    """What, beside its number of rows, a graph is made for: which kernels run in it, and on how much."""

    chunk: int  # the most tokens of a sequence; 1: every sequence has one token
    num_decode_rows: int = 0  # at most, beside prompts; only of graphs with prompts
    has_long_contexts: bool = False  # whose prompts have other tiles

    @property
    def has_prompts(self) -> bool:
        """Whether chunks may be longer than the kernels for short ones take."""
        return self.chunk > MAX_CAPTURED_CHUNK_ROWS


DECODE_ONLY = StepShape(1)


class CapturableAttention(AttentionBackend, Protocol):
    """An AttentionBackend on CUDA whose steps of not too many tokens can be captured.

    There is one graph per `padded_num_rows` and `shape`, an element of `captured_shapes`. On these two alone depend the
    grids and addresses of `forward`. To capture, call `begin_step` with any such step (also one without sequences), run
    `forward` of `layers_to_compile` uncaptured, so that kernels are compiled, and capture `forward` of all layers on
    `qkv` and `out` at their final addresses. To replay, call `begin_step` with the same sizes on the stream of the
    replay, outside the graph.

    No method waits for the device, except `begin_step` when it is three steps ahead of the device.
    """

    layers_to_compile: Sequence[int]  # one for each kernel: layers that differ only in their windows share it

    captured_shapes: Sequence[StepShape]  # the first is DECODE_ONLY

    def captured_shape(self, step: StepMetadata) -> StepShape | None:
        """The element of `captured_shapes` whose graph can run the step; None: it runs kernel by kernel."""
        ...

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        """Plans the kernels' work and sends the plan to the device.

        padded_num_rows: for steps that a graph can run, the number of rows of qkv and out. None: no padding. Rows
        beyond the step's are padding, whose output becomes zero in decode-only steps and is not written in others.
        shape: of the graph; DECODE_ONLY also if there is none. Raises CapacityError for more sequences or tokens than
        the backend was created for.
        """
        ...
