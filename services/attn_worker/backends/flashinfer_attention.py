"""Paged attention on CUDA with FlashInfer's kernels, selected by `attention.backend`; RoPE and append use our kernels.

Written for flashinfer-python 0.5.3: `plan` once per step and kind of window, `run` once per layer. Called by the
engine thread alone; all work goes to the current stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import flashinfer
import numpy as np
import structlog
import torch

from services.attn_worker.backends.rope_angles import RopeAngles
from services.attn_worker.backends.step_upload import NUM_STAGING_BUFFERS, StepUpload
from services.attn_worker.backends.triton_rope_append import append_prefill, rotate_queries
from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.runner.step_metadata import StepMetadata, build_step_metadata
from services.common.errors import CapacityError, ConfigError
from services.common.kv_cache.scales import KVScales
from services.common.model_config import ModelConfig

log = structlog.get_logger()

_LAYOUT = "HND"  # FlashInfer's name for blocks of [num_kv_heads, block_size, head_dim]
_MAX_ERROR_CHARS = 500  # kept from the end of a compiler's output, where the cause is
_MAX_PROGRAMS_PER_SM = 16  # of FlashInfer's decode kernel without tensor cores, which has 128 threads
_ALIGNMENT_BYTES = 4096  # total padding between the arrays that a plan puts into a workspace

Wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper | flashinfer.BatchPrefillWithPagedKVCacheWrapper


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a step's sequences in FlashInfer's format; padding rows have no blocks."""

    starts: np.ndarray  # int32 [num_rows + 1], start of each row's blocks in `indices`, and the end of the last
    last_lens: np.ndarray  # int32 [num_rows], keys in each row's last block
    indices: torch.Tensor  # int32, on the device


class FlashInferAttention:
    """A CapturableAttention in bfloat16 or float16, for head dimensions of 64, 128 and 256.

    The cache has the layout of the Triton kernels: FlashInfer accepts any strides of keys and values. Decode-only steps
    use FlashInfer's decode kernels, one wrapper per `padded_num_seqs` and kind of window. In a step with a prompt, all
    rows use its prefill kernels (fa2, because fa3 runs only on Hopper).
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: KVCacheSpec,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        *,
        max_num_seqs: int = 1024,
        max_num_tokens: int = 8192,
    ) -> None:
        """`max_num_seqs` and `max_num_tokens` limit a step. Compiles the kernels, which takes a minute or more if they
        are not in FlashInfer's cache. Raises CapacityError if memory is too small, ConfigError if the kernels do not
        compile or the cache has another dtype than `dtype`.
        """
        if set(spec.dtypes) != {dtype}:
            raise ConfigError(f"FlashInfer is given a KV cache of the model's {dtype}, this one is {spec.dtype}")
        assert config.rope.rotary_dim == config.head_dim, "partial rotation is not supported"
        assert (spec.num_blocks + 1) * spec.block_size < 2**31, "slots are int32"
        self._config = config
        self._spec = spec
        self._block_size = spec.block_size
        self._dtype = dtype
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._max_num_indices = max_num_seqs * -(-max_model_len // spec.block_size)
        self._has_groups = config.num_heads > config.num_kv_heads
        windows = set(spec.windows)
        num_entries = self._max_num_indices + 2 * max_num_seqs + 1 + 4 * max_num_tokens
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._storage = BlockStorage(spec, spec.head_major_block, device)
        self._caches = self._storage.layers
        self.layers_to_compile = [0]
        self._keys_values = [(cache[:, :, 0], cache[:, :, 1]) for cache in self._caches]
        try:
            query_shape = (max(max_num_tokens, max_num_seqs), config.num_heads, config.head_dim)
            self._query = torch.empty(query_shape, dtype=dtype, device=device)
            self._angles = RopeAngles(config, max_model_len, max_num_tokens, device)
            self._upload = StepUpload(num_entries, device)
            # Layers run one after the other, so all wrappers can share the memory for partial results.
            num_bytes = _partial_bytes(config, max_num_seqs, num_sms)
            self._partials = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            num_bytes = _plan_bytes(config, max_num_seqs, max_num_tokens, num_sms)
            self._plans = {window: _PlanMemory(num_bytes, device) for window in windows}
            self._prefill_wrappers: dict[int | None, Wrapper] = {
                window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._partials, _LAYOUT, backend="fa2")
                for window in windows
            }
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            raise CapacityError(
                f"{spec.num_blocks} KV blocks ({spec.num_bytes} bytes) and workspaces do not fit on {device}: {error}"
            ) from error
        self._decode_wrappers: dict[int, dict[int | None, Wrapper]] = {}  # by padded number of sequences
        self._compile()

    @staticmethod
    def is_decode_only(step: StepMetadata) -> bool:
        """Whether every sequence has one token, so that FlashInfer's decode kernels can run the step."""
        return len(step.positions) == len(step.num_tokens)

    def copy_blocks(self, copies: Sequence[tuple[int, int]], group: int = 0) -> None:
        """Copies blocks with their scales."""
        self._storage.copy_blocks(copies, group)

    def use_scales(self, scales: KVScales) -> None:
        """Sets scales that no layer reads, because this backend refuses FP8."""
        self._storage.use_scales(scales)

    def use_sinks(self, sinks: Sequence[Sequence[float]]) -> None:
        """Never called: `select_backend` refuses models with sinks."""
        raise AssertionError("these kernels have no sinks")

    def begin_step(self, step: StepMetadata, padded_num_seqs: int | None = None) -> None:
        """Runs FlashInfer's `plan` on the host and sends the plan to the device."""
        num_seqs, num_tokens = len(step.num_tokens), len(step.positions)
        padded = num_seqs if padded_num_seqs is None else padded_num_seqs
        is_decode = self.is_decode_only(step)
        assert padded == num_seqs or (is_decode and padded > num_seqs), "no room for the step"
        if padded > self._max_num_seqs or num_tokens > self._max_num_tokens:
            raise CapacityError(
                f"a step has {padded} sequences and {num_tokens} tokens, the attention backend was made for"
                f" {self._max_num_seqs} and {self._max_num_tokens}"
            )
        num_rows = padded if is_decode else num_tokens
        upload = self._upload
        upload.begin()
        # The arrays that a graph reads come first, so that their addresses depend only on `padded`.
        starts, starts_on_device = upload.reserve((padded + 1,))
        last_lens, last_lens_on_device = upload.reserve((padded,))
        angle_rows, self._angle_rows = upload.reserve((num_rows,))
        slots, self._slots = upload.reserve((num_rows,))
        blocks = self._write_blocks(step, starts, last_lens)
        angle_rows[:num_tokens], angle_rows[num_tokens:] = self._angles.write(step, upload), 0
        slots[:num_tokens], slots[num_tokens:] = step.slot_mapping, -1
        if is_decode:
            if padded not in self._decode_wrappers:
                self._decode_wrappers[padded] = self._make_decode_wrappers(
                    starts_on_device, last_lens_on_device, blocks.indices
                )
            self._wrappers = self._decode_wrappers[padded]
            self._plan_decode(blocks)
        else:
            self._wrappers = self._prefill_wrappers
            self._plan_prefill(step, blocks)
        upload.send()
        self._angles.compute()

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Rotates, appends and attends with FlashInfer's `run`. `qkv` and `out` may have more rows than the step."""
        assert out.stride(0) == self._config.attn_size, "FlashInfer writes rows without gaps"
        num_rows, angles = len(self._slots), self._angles.table
        query = self._query[:num_rows]
        append_prefill(qkv, self._caches[layer], None, angles, self._angle_rows, self._slots)
        rotate_queries(qkv, query, angles, self._angle_rows)
        wrapper = self._wrappers[self._spec.windows[layer]]
        wrapper.run(query, self._keys_values[layer], out=out[:num_rows].view(query.shape))

    def _write_blocks(self, step: StepMetadata, starts: np.ndarray, last_lens: np.ndarray) -> _Blocks:
        num_seqs, width = step.block_tables.shape
        counts = -(-step.context_lens // self._block_size)
        starts[0] = 0
        np.cumsum(counts, out=starts[1 : num_seqs + 1])
        starts[num_seqs + 1 :] = starts[num_seqs]
        last_lens[:num_seqs] = (step.context_lens - 1) % self._block_size + 1
        last_lens[num_seqs:] = 0
        num_indices = int(starts[num_seqs])
        # At least one element: an empty tensor has no address, and graphs are captured with empty steps.
        indices, indices_on_device = self._upload.reserve((max(num_indices, 1),))
        indices[:num_indices] = step.block_tables[np.arange(width) < counts[:, None]]
        return _Blocks(starts, last_lens, indices_on_device[:num_indices])

    def _make_decode_wrappers(
        self, starts: torch.Tensor, last_lens: torch.Tensor, indices: torch.Tensor
    ) -> dict[int | None, Wrapper]:
        """Wrappers for `len(last_lens)` rows. Their kernels read the blocks of every step at these addresses."""
        room = indices.as_strided((self._max_num_indices,), (1,))  # the room that a longest step has at this address
        return {window: self._make_decode_wrapper(window, starts, last_lens, room) for window in self._plans}

    def _make_decode_wrapper(
        self, window: int | None, starts: torch.Tensor, last_lens: torch.Tensor, room: torch.Tensor
    ) -> Wrapper:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._partials,
            _LAYOUT,
            use_cuda_graph=True,
            # Tensor cores are faster for groups, and the other kernels do not support every group size.
            use_tensor_cores=self._has_groups,
            paged_kv_indptr_buffer=starts,
            paged_kv_indices_buffer=room,
            paged_kv_last_page_len_buffer=last_lens,
        )
        # `fast_decode_plan` needs a wrapper that has been planned once. This plan is for rows without keys.
        self._plans[window].lend(wrapper, self._upload.staging_index)
        zeros = torch.zeros(len(starts), dtype=torch.int32)
        wrapper.plan(zeros, room[:0], zeros[1:], *self._shape(), **self._options(window))
        return wrapper

    def _plan_decode(self, blocks: _Blocks) -> None:
        """Plans like `plan`, but without copies that `StepUpload` makes anyway, and without a Python loop over rows."""
        starts, last_lens = torch.from_numpy(blocks.starts), torch.from_numpy(blocks.last_lens)
        for window, wrapper in self._wrappers.items():
            self._plans[window].lend(wrapper, self._upload.staging_index)
            flashinfer.fast_decode_plan(
                wrapper, starts, blocks.indices, last_lens, *self._shape(), **self._options(window)
            )

    def _plan_prefill(self, step: StepMetadata, blocks: _Blocks) -> None:
        first_rows = np.zeros(len(step.num_tokens) + 1, np.int32)
        np.cumsum(step.num_tokens, out=first_rows[1:])
        tensors = (
            torch.from_numpy(first_rows),
            torch.from_numpy(blocks.starts),
            blocks.indices,
            torch.from_numpy(blocks.last_lens),
        )
        for window, wrapper in self._wrappers.items():
            self._plans[window].lend(wrapper, self._upload.staging_index)
            wrapper.plan(*tensors, *self._shape(), causal=True, **self._options(window))

    def _shape(self) -> tuple[int, int, int, int]:
        config = self._config
        return config.num_heads, config.num_kv_heads, config.head_dim, self._block_size

    def _options(self, window: int | None) -> dict[str, object]:
        """Options of `plan`. FlashInfer's window counts the keys left of a query; ours includes the query's own key."""
        window_left = -1 if window is None else window - 1
        return {"window_left": window_left, "q_data_type": self._dtype, "kv_data_type": self._spec.dtype}

    @torch.inference_mode()
    def _compile(self) -> None:
        """Runs every kernel once, on the null block: this compiles the kernels and loads them before any capture."""
        config, size = self._config, self._block_size
        log.info("FlashInfer compiles its kernels, or loads them", version=flashinfer.__version__)
        start = time.monotonic()
        layers = [self._spec.windows.index(window) for window in self._plans]
        qkv = torch.zeros(2, config.qkv_size, dtype=self._dtype, device=self._partials.device)
        out = torch.empty(2, config.attn_size, dtype=self._dtype, device=self._partials.device)
        one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
        try:
            for num_tokens in range(1, min(2, self._max_num_tokens) + 1):
                table = np.full((1, num_tokens), self._spec.num_blocks, np.int32)
                self.begin_step(build_step_metadata(one * num_tokens, none, one * num_tokens, table, size))
                for layer in layers:
                    self.forward(layer, qkv[:num_tokens], out)
        except (RuntimeError, OSError) as error:  # from nvcc, or because ninja is missing
            raise ConfigError(
                f"FlashInfer cannot compile or load its kernels: {str(error)[-_MAX_ERROR_CHARS:]}"
            ) from error
        torch.cuda.synchronize()  # steps run on another stream
        log.info("FlashInfer's kernels are ready", seconds=round(time.monotonic() - start, 1))


class _PlanMemory:
    """The memory for plans of one kind of window: device memory, and pinned memory from which it is filled.

    `plan` enqueues the copy and returns. The next `plan` would overwrite the pinned memory without waiting for the
    copy. So there are several pinned buffers, used in turn with those of `StepUpload`: before `StepUpload` uses a
    buffer again, it waits for everything enqueued before its `send`, and plans are made before that. One buffer on the
    device is enough, since copies and kernels run in the order of the stream.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._staging = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_STAGING_BUFFERS)
        ]

    def lend(self, wrapper: Wrapper, staging_index: int) -> None:
        """Makes the wrapper plan with this memory. FlashInfer's own method allocates pinned memory in every step."""
        wrapper._int_workspace_buffer = self._on_device
        wrapper._pin_memory_int_workspace_buffer = self._staging[staging_index]


def _partial_bytes(config: ModelConfig, max_num_seqs: int, num_sms: int) -> int:
    """Maximum bytes of partial results of split contexts, by DecodePlan and PrefillPlan in FlashInfer's scheduler.cuh.

    FlashInfer's tensor-core kernels use tiles of packed rows, with the query heads of a group side by side. Contexts
    are split until two tiles run on each SM. For graphs, every tile that a decode step may have needs room. Without
    tensor cores there are more programs, but of one row each, so they need less.
    """
    group = config.num_heads // config.num_kv_heads
    num_split_tiles = 2 * num_sms // config.num_kv_heads
    num_rows = num_split_tiles * 128  # of the largest tile
    if group > 1:
        tile = 128 if group > 64 and config.head_dim < 256 else 64 if group > 16 else 16
        num_rows = max(num_rows, (-(-max_num_seqs * group // tile) + max_num_seqs) * tile)
    return 4 * config.num_heads * num_rows * (config.head_dim + 1) + _ALIGNMENT_BYTES


def _plan_bytes(config: ModelConfig, max_num_seqs: int, max_num_tokens: int, num_sms: int) -> int:
    """Maximum bytes of a plan: 17 per tile of at least 16 packed rows, and 4 per row or sequence."""
    group = config.num_heads // config.num_kv_heads
    num_tiles = -(-max_num_tokens * group // 16) + 2 * max_num_seqs + _MAX_PROGRAMS_PER_SM * num_sms
    return 20 * num_tiles + 4 * (max_num_tokens + max_num_seqs) + _ALIGNMENT_BYTES
