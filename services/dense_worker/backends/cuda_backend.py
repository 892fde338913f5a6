"""The segments on CUDA with fused kernels: the parts of `model/` run by `CudaOperations`.

Owned by the engine thread. All work goes to the current stream, at fixed addresses and without waiting, so
that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING

import structlog
import torch

from services.channel import rows_of_layer
from services.common.errors import DeviceError
from services.common.model_config import ModelConfig
from services.common.terminal import progress_bar
from services.dense_worker.backends import InputEmbeds
from services.dense_worker.backends.cuda_operations import CudaOperations
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.linear.linear import Linear, PlainWeight
from services.dense_worker.kernels.linear.linear_choice import (
    ROW_BUCKETS,
    TILED_BUCKETS,
    LinearKernel,
    row_bucket,
    time_in_graph_us,
)
from services.dense_worker.kernels.linear.matmul_choice import has_choice
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.kernels.stroke.row_stroke import RowStroke, StrokeShape, compile_stroke, shape_of
from services.dense_worker.model.head import Head
from services.dense_worker.model.layer import AfterAttention, NormedQkv, SequentialResidual
from services.dense_worker.model.mlp import ActivatedMlp
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.segments import Middle, Segments
from services.dense_worker.parameters import parts_of_type
from services.step import StepPlan

if TYPE_CHECKING:
    from services.dense_worker.kernels.lora.cuda_lora import CudaLora

log = structlog.get_logger()

# Layers, besides later ones with other shapes:
_MEASURED_LAYERS = 8  # of a step that is timed
_DISTINCT_LAYERS = 2  # behind the first segment, of a step that is only compiled for the kernels that differ


class CudaBackend(TorchBackend):
    """The same segments on CUDA, in float32, bfloat16 or float16, for one thread and one stream.

    The constructor compiles the kernels and measures which are faster (`LinearChoice`), which takes seconds and waits
    for the device. No method but `choose_products` waits for the device afterwards: it measures what graphs of more
    than one row need.

    Workspaces have room for `max_num_tokens` tokens and keep their addresses. `first` allocates the residual, which
    `middle` overwrites; `last` allocates the logits and its rows. During a capture this memory comes from the graph's
    pool.
    """

    captures_embeds = True

    def __init__(
        self,
        weights: ModelWeights,
        config: ModelConfig,
        max_num_tokens: int,
        lora: CudaLora | None = None,
        *,
        is_deterministic: bool = False,
        operations: CudaOperations | None = None,
        rows_of_graphs: Sequence[int] = (),
    ) -> None:
        """`is_deterministic`: the bits of a row do not depend on the other rows of a step.

        `operations`: those of a rank; None: of a model on one GPU.
        `rows_of_graphs`: numbers of rows for which `choose_products` will be called.
        """
        self._config, self._max_num_tokens, self._dtype = config, max_num_tokens, weights.dtype
        self._lora = lora
        has_strokes = operations is None and not is_deterministic
        operations = operations or CudaOperations(
            config, max_num_tokens, weights.dtype, weights.device, lora, is_deterministic=is_deterministic
        )
        super().__init__(weights, operations=operations)
        for before, norm, after in _norms_between_products(self._segments):
            operations.join(before, norm, after)
        self.logits_dtype = torch.float32 if self._segments.last.head.rescales else self._dtype
        self._measured_segments = _segments_of_each_kind(self._segments.middle, _MEASURED_LAYERS - 1)
        self._distinct_segments = _segments_of_each_kind(self._segments.middle, _DISTINCT_LAYERS)
        self._has_tiles = False  # for some layer
        # What `choose_products` measures, by bucket: layers with kernels of ours, and numbers of tokens.
        self._unmeasured = dict[int | None, tuple[list[Linear], int]]()
        self._strokes: list[RowStroke | None] = [None] * len(self._segments.middle)  # None: kernels of its products
        shapes = self._shapes_of_strokes() if has_strokes else []
        with ThreadPoolExecutor() as threads:
            for shape in set(shapes):
                if isinstance(shape, StrokeShape):
                    # An error comes again, and is logged, where the kernel is loaded.
                    threads.submit(compile_stroke, operations.launcher, shape, weights.device)
            self._choose_kernels(_linears_of_each_kind(weights), rows_of_graphs)
        self._choose_strokes(shapes)
        if lora is not None:
            with lora.compiling():
                for num_tokens in self._step_sizes():
                    self._random_step(num_tokens)()
        for num_tokens in self._step_sizes():  # so that no later step compiles a kernel or loads a library
            self._random_step(num_tokens)()
            if lora is not None:
                with lora.activated():
                    self._random_step(num_tokens)()
        self._loads = [e.loads for e in parts_of_type(RoutedExperts, weights.layers) if e.loads is not None]
        for loads in self._loads:
            loads.zero_()  # those were no tokens of requests
        has_products = self._operations.products.matmuls is not None
        self._rows_to_choose = set(filter(has_choice, rows_of_graphs)) if has_products else set()

    def begin_step(
        self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, input_embeds: InputEmbeds | None = None
    ) -> None:
        """Copies the positions, if the embedding needs them, and the number of tokens, if experts do.

        Refuses a step that the workspaces do not hold: the kernels would write beyond them.
        """
        assert num_tokens <= self._max_num_tokens, f"{num_tokens} tokens, workspaces for {self._max_num_tokens}"
        super().begin_step(plan, num_tokens, num_sampled, input_embeds)
        if self._operations.experts is not None:
            self._operations.experts.set_num_tokens(plan.num_tokens)

    def middle(
        self,
        layer: int,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        qkv_out: torch.Tensor,
        added: InputEmbeds | None = None,
    ) -> torch.Tensor:
        """Enqueues the segment, of one row in one kernel where that is faster. The residual is written in place."""
        stroke = self._strokes[layer] if len(residual) == 1 else None
        if stroke is None or added is not None or self._operations.products.adds_deltas:
            return super().middle(layer, attn_out, residual, qkv_out, added)
        stroke(self._segments.middle[layer], attn_out, residual, qkv_out)
        return residual

    def last(
        self,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor,
        hidden_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Enqueues the last segment for the selected rows -> a new tensor of logits."""
        if not len(rows) and not self.always_ends:
            return torch.empty(0, self._config.vocab_size, dtype=self.logits_dtype, device=rows.device)
        return super().last(attn_out, residual, rows, hidden_out)

    def choose_products(self, num_rows: int) -> None:
        """Measures once which products of so many rows are fastest, where there is a choice. Waits for the device."""
        unmeasured = self._unmeasured.pop(row_bucket(num_rows), None)
        if unmeasured is None and num_rows not in self._rows_to_choose:
            return
        before = [loads.clone() for loads in self._loads]
        # With the adapters of the step before, their kernels would run, whatever is chosen.
        with nullcontext() if self._lora is None else self._lora.activated(False):
            try:
                if unmeasured is not None:
                    linears, most_rows = unmeasured
                    self._operations.products.choice.measure(linears, most_rows, self._random_step(most_rows))
                if num_rows in self._rows_to_choose:
                    self._rows_to_choose.remove(num_rows)
                    with self._operations.products.matmuls.choosing():
                        self._random_step(num_rows)()
            except torch.OutOfMemoryError as error:
                log.warning("no room to measure products", num_rows=num_rows, reason=str(error))
        for loads, counted in zip(self._loads, before, strict=True):
            loads.copy_(counted)  # those were no tokens of requests

    def _choose_kernels(self, linears: list[Linear], rows_of_graphs: Sequence[int]) -> None:
        """Measures whole steps. `linears` has one of each kind of layer, in the order of a step.

        Steps of several rows that have graphs are left to `choose_products`, with kernels of ours until then.
        """
        operations = self._operations
        for linear in linears:
            if not isinstance(linear.weight, PlainWeight):
                log.info("kernels of a quantized layer", layer=linear.name, **operations.products.kernels_of(linear))
        streamed = [linear for linear in linears if operations.products.can_stream(linear)]
        tiled = [linear for linear in linears if operations.products.can_tile(linear)]
        if not streamed:
            with operations.launcher.compiling():
                for num_tokens in operations.products.compiled_rows:
                    self._random_step(min(num_tokens, self._max_num_tokens))()
            return
        choice = operations.products.choice
        self._has_tiles = bool(tiled)
        with operations.launcher.compiling():
            # First with cuBLAS for one kind of layer, as it is measured: its neighbours then fuse less.
            for exchanged in (*([linear] for linear in streamed), []):
                choice.set_all(streamed, LinearKernel.STREAMED)
                choice.set_all(tiled, LinearKernel.TILED)
                choice.set_all(exchanged, LinearKernel.CUBLAS)
                layers = self._distinct_segments if exchanged else self._measured_segments
                for num_tokens in self._step_sizes():
                    self._random_step(num_tokens, layers)()
        sizes = [(streamed, num_tokens) for num_tokens in ROW_BUCKETS if num_tokens <= self._max_num_tokens]
        sizes += [(tiled, num_tokens) for num_tokens in self._tiled_sizes()]
        later = {row_bucket(num_rows) for num_rows in rows_of_graphs if num_rows > 1}
        self._unmeasured = {row_bucket(size): (layers, size) for layers, size in sizes if row_bucket(size) in later}
        now = [(layers, size) for layers, size in sizes if row_bucket(size) not in later]
        with progress_bar("choosing kernels", len(now), " sizes") as advance:
            for layers, num_tokens in now:
                choice.measure(layers, num_tokens, self._random_step(num_tokens))
                advance(1)

    def _shapes_of_strokes(self) -> list[StrokeShape | str]:
        """Of each segment between two attention calls, or why there is no kernel for it."""
        launcher = self._operations.launcher
        if not launcher.is_hopper:
            return []
        return [shape_of(segment, launcher, self._dtype) for segment in self._segments.middle]

    def _choose_strokes(self, shapes: list[StrokeShape | str]) -> None:
        """Measures whether steps of one row are faster with one kernel for what lies between two attention calls."""
        launcher = self._operations.launcher
        if not any(isinstance(shape, StrokeShape) for shape in shapes):
            if shapes:
                log.info("no kernel of a whole stroke", reason=shapes[0])
            return
        products_us = time_in_graph_us(self._random_step(1))
        try:
            kernels = {
                shape: RowStroke(launcher, shape, self._device)
                for shape in set(shapes)
                if isinstance(shape, StrokeShape)
            }
        except (DeviceError, OSError) as error:  # OSError: the cache cannot be written
            log.warning("no kernel of a whole stroke", reason=str(error))
            return
        self._strokes = [kernels.get(shape) for shape in shapes]
        strokes_us = time_in_graph_us(self._random_step(1))
        if strokes_us >= products_us:
            self._strokes = [None] * len(shapes)
        log.info(
            "kernel of a whole stroke",
            is_chosen=strokes_us < products_us,
            step_us=round(strokes_us, 1),
            of_products_us=round(products_us, 1),
        )

    def _step_sizes(self) -> list[int]:
        """Numbers of tokens whose steps together run every kernel."""
        many = TILED_BUCKETS[-1] if self._has_tiles else ROW_BUCKETS[-1]  # beyond, no kernel of ours multiplies
        compiled = self._operations.products.compiled_rows
        sizes = {min(size, self._max_num_tokens) for size in (*ROW_BUCKETS, many + 1, *compiled)}
        sizes.update(self._tiled_sizes())
        if self._operations.experts is not None:
            sizes.update(self._operations.experts.variant_sizes())
        return sorted(sizes)

    def _tiled_sizes(self) -> list[int]:
        """The most tokens in each bucket of the kernels of tiles, if the model has layers for them."""
        if not self._has_tiles:
            return []
        buckets = pairwise((ROW_BUCKETS[-1], *TILED_BUCKETS))
        return [min(bucket, self._max_num_tokens) for below, bucket in buckets if below < self._max_num_tokens]

    def _random_step(self, num_tokens: int, layers: Sequence[int] | None = None) -> Callable[[], None]:
        """A decode step through some of the layers, on random inputs: a GPU computes faster on zeros.

        layers: the segments between two attention calls; None: those that are measured
        """
        layers = self._measured_segments if layers is None else layers
        config, dtype, device = self._config, self._dtype, self._device
        token_ids = torch.randint(config.vocab_size, (num_tokens,), device=device)
        qkv = torch.empty(num_tokens, config.qkv_size, dtype=dtype, device=device)
        attn_out = torch.randn(num_tokens, config.attn_size, dtype=dtype, device=device)
        # Logits of all rows would take half a GB; the layers before have kernels for all rows compiled and measured.
        num_rows = min(num_tokens, ROW_BUCKETS[-1] + 1) if layers else num_tokens
        rows = torch.arange(num_rows, device=device)

        def run() -> None:
            residual = self.first(token_ids, qkv)
            for layer in layers:
                keep_gate(self._segments.middle[layer].after)
                residual = self.middle(layer, attn_out, residual, qkv)
            keep_gate(self._segments.last.after)
            self.last(attn_out, residual, rows)

        def keep_gate(after: AfterAttention) -> None:
            """The half of a layer that makes its gate may not be among the measured ones."""
            self._operations.keep_gate(rows_of_layer(attn_out, after.attn_size))

        return run


def _segments_of_each_kind(middle: Sequence[Middle], num_first: int) -> list[int]:
    """The first middle segments, and later ones that multiply in shapes which those before them do not have."""
    seen: set[tuple[str, int, int]] = set()
    chosen = []
    for layer, segment in enumerate(middle):
        kinds = {_kind(linear) for linear in parts_of_type(Linear, segment)}
        if layer < num_first or not kinds <= seen:
            chosen.append(layer)
        seen |= kinds
    return chosen


def _norms_between_products(segments: Segments) -> Iterator[tuple[Linear, Norm, Linear]]:
    """A product that adds to the residual, a norm of the sum, and the only product that reads it."""
    for segment in (*segments.middle, segments.last):
        layer, following = segment.after, segment.before if isinstance(segment, Middle) else segment.head
        if not isinstance(layer, SequentialResidual) or not isinstance(layer.mlp, ActivatedMlp):
            continue
        mlp = layer.mlp
        if mlp.norm is not None:
            yield layer.o, mlp.norm, mlp.first
        if layer.added_input is not None or layer.layer_scalar is not None:
            continue
        if isinstance(following, NormedQkv) and following.norm is not None:
            yield mlp.down, following.norm, following.qkv
        if isinstance(following, Head) and following.norm is not None and following.projection is None:
            yield mlp.down, following.norm, following.lm_head


def _kind(linear: Linear) -> tuple[str, int, int]:
    return linear.name, linear.out_features, linear.in_features


def _linears_of_each_kind(weights: ModelWeights) -> list[Linear]:
    """One linear layer of each name and shape, in the order of a step: layers with experts have others, for example."""
    found: dict[tuple[str, int, int], Linear] = {}
    for linear in parts_of_type(Linear, (weights.layers, weights.head)):
        found.setdefault(_kind(linear), linear)
    return list(found.values())
