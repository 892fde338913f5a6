"""Times our attention kernels, and FlashInfer's, for `bench/attention.py`. Needs triton and a CUDA device."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from types import ModuleType

import numpy as np
import torch

from bench.gpu.attention_steps import MAX_MODEL_LEN, Shape, make_config, make_step
from bench.gpu.device_rates import time_graph
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.mha.triton_rope_append import append_prefill
from services.attn_worker.layers.triton_attention import TritonAttention

CACHE_BYTES = 3 << 30  # KV cache of all layers together, many times the L2 cache
MAX_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    kind: str  # "decode", "prefill", "append" or "host"
    shape: str  # heads / kv heads / head_dim
    block_size: int
    step: str
    microseconds: float
    rate: float | None  # TB/s of keys and values read (decode) or moved (append), TFLOP/s (prefill)
    share: float | None  # fraction of the copy or matrix rate
    flashinfer_microseconds: float | None


class Bench:
    """Times kinds of steps on one device; each call frees its memory."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        copy_rate: float,
        matrix_rate: float,
        flashinfer: ModuleType | None,
        flashinfer_prefill: str,
    ) -> None:
        self._device, self._dtype, self._cache_dtype = device, dtype, cache_dtype
        self._prefill_kernels = flashinfer_prefill
        self._copy_rate, self._matrix_rate = copy_rate, matrix_rate
        self._flashinfer = flashinfer

    @torch.inference_mode()
    def decode(self, shape: Shape, block_size: int, batch: int, context: int) -> Row:
        """One new token for each of `batch` sequences of `context` tokens, RoPE and append included."""
        num_layers = self._num_layers(shape, batch * context)
        backend, tables = self._make_backend(shape, block_size, batch, context, num_layers)
        qkv, out = self._make_rows(shape, batch)
        backend.begin_step(make_step(tables, context, 1, block_size), padded_num_rows=batch)
        microseconds = time_graph(lambda layer: backend.forward(layer, qkv, out), num_layers)
        rate = self._kv_bytes(shape, batch * context) / microseconds / 1e6
        theirs = None
        if self._flashinfer is not None:
            theirs = self._flashinfer_decode(shape, block_size, batch, context, num_layers)
        step = f"{batch} x {context}"
        share = rate / self._copy_rate
        return Row("decode", str(shape), block_size, step, microseconds, rate, share, theirs)

    @torch.inference_mode()
    def prefill(self, shape: Shape, block_size: int, batch: int, length: int) -> tuple[Row, Row]:
        """`batch` new prompts of `length` tokens: the append alone, and the append with causal attention."""
        num_tokens, num_layers = batch * length, 4
        backend, tables = self._make_backend(shape, block_size, batch, length, num_layers)
        qkv, out = self._make_rows(shape, num_tokens)
        step = make_step(tables, length, length, block_size)
        backend.begin_step(step)
        both = time_graph(lambda layer: backend.forward(layer, qkv, out), num_layers)
        slots = torch.from_numpy(step.slot_mapping.astype(np.int32)).to(self._device)
        angle_rows = torch.from_numpy(step.positions).to(self._device)
        angles = torch.randn(MAX_MODEL_LEN, shape.head_dim, device=self._device)
        cache_shape = (tables.size + 1, shape.num_kv_heads, 2, block_size, shape.head_dim)
        caches = [torch.empty(cache_shape, dtype=self._cache_dtype, device=self._device) for _ in range(num_layers)]
        scales_shape = {torch.int8: cache_shape[:-1], torch.float8_e4m3fn: (2,)}.get(self._cache_dtype)
        scales = None if scales_shape is None else torch.ones(scales_shape, device=self._device)
        append = time_graph(
            lambda layer: append_prefill(qkv, caches[layer], scales, angles, angle_rows, slots), num_layers
        )
        flop = 4 * batch * (length * (length + 1) / 2) * shape.num_heads * shape.head_dim
        flop_rate = flop / (both - append) / 1e6
        num_bytes = self._kv_bytes(shape, num_tokens, self._dtype) + self._kv_bytes(shape, num_tokens)
        append_rate = num_bytes / append / 1e6
        theirs = None
        if self._flashinfer is not None:
            theirs = self._flashinfer_prefill(shape, block_size, batch, length)
        name = f"{batch} x {length}"
        return (
            Row(
                "append",
                str(shape),
                block_size,
                name,
                append,
                append_rate,
                append_rate / self._copy_rate,
                None,
            ),
            Row(
                "prefill",
                str(shape),
                block_size,
                name,
                both,
                flop_rate,
                flop_rate / self._matrix_rate,
                theirs,
            ),
        )

    @torch.inference_mode()
    def begin_step(self, shape: Shape, block_size: int, batch: int, context: int) -> Row:
        """Host time of `begin_step` for a decode step."""
        backend, tables = self._make_backend(shape, block_size, batch, context, num_layers=1)
        step = make_step(tables, context, 1, block_size)
        seconds = []
        for _ in range(50):
            start = time.perf_counter()
            backend.begin_step(step, padded_num_rows=batch)
            seconds.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        step_name = f"begin {batch} x {context}"
        return Row(
            "host", str(shape), block_size, step_name, statistics.median(seconds) * 1e6, None, None, None
        )

    def _num_layers(self, shape: Shape, num_tokens: int) -> int:
        return min(MAX_LAYERS, max(2, CACHE_BYTES // self._kv_bytes(shape, num_tokens)))

    def _make_backend(
        self, shape: Shape, block_size: int, batch: int, context: int, num_layers: int
    ) -> tuple[TritonAttention, np.ndarray]:
        """A backend with random caches, and the block tables of `batch` sequences in random order."""
        blocks_per_seq = -(-context // block_size)
        torch.cuda.empty_cache()
        config = make_config(shape, num_layers)
        spec = KVCacheSpec.of_model(config, self._cache_dtype, batch * blocks_per_seq, block_size)
        most = max(8192, batch * context)
        backend = TritonAttention(
            BackendSetup(config, spec, self._dtype, self._device, MAX_MODEL_LEN, max_num_tokens=most)
        )
        for cache, scales in zip(backend._caches, backend.storage.scales, strict=True):
            _fill_random(cache)  # zeros are faster than data
            if scales is not None:
                scales.fill_(1 / 64)
        order = np.random.default_rng(0).permutation(batch * blocks_per_seq)
        return backend, order.reshape(batch, blocks_per_seq).astype(np.int32)

    def _make_rows(self, shape: Shape, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        qkv_size = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        qkv = torch.randn(num_tokens, qkv_size, dtype=self._dtype, device=self._device)
        return qkv, torch.empty_like(qkv[:, : shape.num_heads * shape.head_dim]).contiguous()

    def _kv_bytes(self, shape: Shape, num_tokens: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of keys and values without scales, as they are stored, or in another dtype."""
        return 2 * num_tokens * shape.num_kv_heads * shape.head_dim * (dtype or self._cache_dtype).itemsize

    def _flashinfer_decode(
        self, shape: Shape, block_size: int, batch: int, context: int, num_layers: int
    ) -> float:
        assert self._flashinfer is not None
        indptr, indices, last_lens, caches = self._flashinfer_cache(
            shape, block_size, batch, context, num_layers
        )
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(256 << 20, dtype=torch.uint8, device=self._device),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=shape.num_heads > shape.num_kv_heads,
            paged_kv_indptr_buffer=torch.zeros_like(indptr, device=self._device),
            paged_kv_indices_buffer=torch.zeros_like(indices),
            paged_kv_last_page_len_buffer=torch.zeros_like(last_lens, device=self._device),
        )
        types = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        wrapper.plan(indptr, indices, last_lens, *asdict(shape).values(), block_size, **types)
        query = torch.randn(batch, shape.num_heads, shape.head_dim, dtype=self._dtype, device=self._device)
        out = torch.empty_like(query)
        return time_graph(lambda layer: wrapper.run(query, caches[layer], out=out), num_layers)

    def _flashinfer_prefill(self, shape: Shape, block_size: int, batch: int, length: int) -> float:
        assert self._flashinfer is not None
        indptr, indices, last_lens, caches = self._flashinfer_cache(shape, block_size, batch, length, 2)
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.zeros(512 << 20, dtype=torch.uint8, device=self._device),
            "HND",
            backend=self._prefill_kernels,
        )
        rows = torch.arange(batch + 1, dtype=torch.int32) * length
        types = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        wrapper.plan(
            rows, indptr, indices, last_lens, *asdict(shape).values(), block_size, causal=True, **types
        )
        num_tokens = batch * length
        query = torch.randn(
            num_tokens, shape.num_heads, shape.head_dim, dtype=self._dtype, device=self._device
        )
        out = torch.empty_like(query)
        return time_graph(lambda layer: wrapper.run(query, caches[layer], out=out), 2)

    def _flashinfer_cache(
        self, shape: Shape, block_size: int, batch: int, context: int, num_layers: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        torch.cuda.empty_cache()
        blocks_per_seq = -(-context // block_size)
        indptr = torch.arange(batch + 1, dtype=torch.int32) * blocks_per_seq
        indices = torch.randperm(batch * blocks_per_seq).int().to(self._device)
        last_lens = torch.full((batch,), (context - 1) % block_size + 1, dtype=torch.int32)
        cache_shape = (batch * blocks_per_seq, 2, shape.num_kv_heads, block_size, shape.head_dim)
        caches = [torch.randn(cache_shape, device=self._device, dtype=self._dtype) for _ in range(num_layers)]
        return indptr, indices, last_lens, caches


def _fill_random(cache: torch.Tensor) -> None:
    if cache.dtype == torch.int8:
        cache.random_(-127, 128)
    elif cache.dtype == torch.float8_e4m3fn:
        cache.view(torch.uint8).random_(0, 127)  # the codes of all numbers from 0 to 448
    else:
        cache.normal_()


def import_flashinfer() -> ModuleType | None:
    try:
        import flashinfer
    except ImportError as error:
        print(f"FlashInfer is not compared: {error}")
        return None
    print(f"FlashInfer {flashinfer.__version__}")
    return flashinfer
