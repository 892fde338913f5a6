"""The segments run by TensorRT: every tensor, weights included, is bound by its address and never copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.common.errors import ConfigError, TwostrokeError
from services.common.model_config import ModelConfig
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.segments import Weights, bind_weights
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine import Engine, TensorType
from services.dense_worker.tensorrt.engine_plan_cache import CachedEnginePlan, EnginePlans
from services.dense_worker.tensorrt.gpu import is_capturing
from services.dense_worker.tensorrt.profiles import Limits, Profile, check_cover, num_reached, profile_index
from services.step import StepPlan

KEPT = "kept"  # how the names of outputs begin that nobody reads
ALIGNMENT_BYTES = 256  # of every address that TensorRT is given
Binding = tuple[str, torch.Tensor]
Sizes = tuple[int, ...]  # dimension 0 of each dynamic input


@dataclass(frozen=True, slots=True)
class _Tuned:
    """What runs the sizes of one profile, for all layers."""

    engine: Engine
    contexts: EngineContexts
    kept: tuple[Binding, ...]  # outputs that nobody reads


class PlanRuns:
    """Runs plans of segments: an engine for each plan; `EngineContexts` gives each run an execution context.

    The profile that contains the size of a run picks the engine. All contexts share one block of device memory,
    because they run one after another on the caller's stream. No method waits for the device.
    """

    def __init__(
        self,
        api: TensorRT,
        plans: EnginePlans,
        weights: Mapping[str, Sequence[Weights]],
        device: torch.device,
        max_sizes: Mapping[str, int],
        current_stream: Callable[[], int],
    ) -> None:
        """`plans` by segment, all with the same first profiles; `weights` by segment and layer; `current_stream` gives
        the CUDA stream's handle. Raises ConfigError for a plan that is not of this model.

        Plans are loaded, and contexts made, for the profiles that `max_sizes`, by segment, reach, no more.
        """
        self.profiles = profiles_of(plans)
        self._current_stream = current_stream
        self._weights = weights
        engines = {
            name: [
                _load_engine(api, cached, weights[name][0])
                for cached in of_segment[: num_reached(self.profiles, max_sizes[name])]
            ]
            for name, of_segment in plans.items()
        }
        num_bytes = max(engine.context_bytes for of_segment in engines.values() for engine in of_segment)
        self._memory = torch.empty(max(num_bytes, ALIGNMENT_BYTES), dtype=torch.uint8, device=device)
        # By segment, for each profile in use.
        self._tuned = {
            name: [
                _Tuned(engine, EngineContexts(engine, self._memory, current_stream), _kept(engine, profile, device))
                for engine, profile in zip(of_segment, self.profiles, strict=False)
            ]
            for name, of_segment in engines.items()
        }

    def num_profiles(self, segment: str) -> int:
        """Of those that are in use."""
        return len(self._tuned[segment])

    def run_size(self, size: int) -> int:
        """How many rows a run of `size` rows must have: more than these only where just a larger size has a plan."""
        return max(size, self.profiles[profile_index(self.profiles, size)].low)

    def output_shape(self, segment: str, name: str) -> tuple[int, ...]:
        """The shape of an output; a dynamic dimension is -1."""
        return self._tuned[segment][0].engine.tensors()[name].shape

    def run(self, segment: str, layer: int, size: int, inputs: list[Binding], outputs: list[Binding]) -> None:
        """Enqueues a segment on the current stream; memory that goes out of use is reused in stream order."""
        stream = self._current_stream()
        assert stream, "on the default stream TensorRT would wait for the device: use a torch.cuda.Stream"
        tuned = self._tuned[segment][profile_index(self.profiles, size)]
        sizes = tuple(len(tensor) for _, tensor in inputs)
        shaped = tuned.contexts.find(sizes)
        context, is_done = shaped.context, shaped.set_shapes(inputs, sizes)
        for name, tensor in (*inputs, *outputs, *tuned.kept, *self._weights[segment][layer].items()):
            assert tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0, f"{name} is not aligned"
            is_done &= context.set_tensor_address(name, tensor.data_ptr())
        if not (is_done and context.execute_async_v3(stream)):
            shaped.sizes = None
            errors = tuned.engine.take_errors()
            raise TwostrokeError(f"TensorRT cannot run segment {segment} for sizes {sizes}: {errors}")


class TensorRTSegments:
    """A DenseBackend whose segments are plans."""

    takes_input_embeds = captures_embeds = False
    gives_hidden_states = False
    always_ends = skips_logits = False
    logits_dtype = torch.float32

    def __init__(
        self,
        api: TensorRT,
        plans: EnginePlans,
        weights: ModelWeights,
        config: ModelConfig,
        limits: Limits,
        current_stream: Callable[[], int],
    ) -> None:
        """`plans` of every segment, and what else `PlanRuns` takes.

        Raises ConfigError for a plan that is not of this model, and for profiles that end below `limits`.
        """
        self._config = config
        embedding = weights.embedding
        self._table, self._residual_is_lookup = embedding.table.data, embedding.is_lookup
        check_cover(profiles_of(plans), limits)
        max_sizes = {name: limits.of(name) for name in plans}
        self._runs = PlanRuns(api, plans, bind_weights(weights), weights.device, max_sizes, current_stream)

    def begin_step(
        self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, input_embeds: None = None
    ) -> None:
        """Refuses a step beyond the profiles that have contexts."""
        profile, num_profiles = profile_index(self._runs.profiles, num_tokens), self._runs.num_profiles("first")
        assert profile < num_profiles, f"{num_tokens} tokens need profile {profile} of {num_profiles} in use"

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor, input_embeds: None = None) -> torch.Tensor:
        """Enqueues the engine of the first segment -> a new residual. May overwrite rows behind `qkv_out`."""
        size = self._runs.run_size(len(token_ids))
        rows = _select(self._table, token_ids, size)
        residual = rows if self._residual_is_lookup else None
        return self._run("first", 0, size, [("embeddings", rows)], qkv_out, residual)

    def middle(self, layer: int, attn_out: torch.Tensor, residual: torch.Tensor, qkv_out: torch.Tensor) -> torch.Tensor:
        """Enqueues the engine of the middle segments with this layer's weights -> a new residual.

        May overwrite rows behind `qkv_out`.
        """
        size = self._runs.run_size(len(attn_out))
        inputs = [("attn_out", _with_rows_behind(attn_out, size)), ("residual", _with_rows_behind(residual, size))]
        return self._run("middle", layer, size, inputs, qkv_out)

    def last(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: None = None
    ) -> torch.Tensor:
        """Enqueues the selection of the rows and the engine of the last segment -> a new tensor of logits."""
        size = self._runs.run_size(len(rows))
        logits = torch.empty(size, self._config.vocab_size, dtype=torch.float32, device=rows.device)
        inputs = [("attn_out", _select(attn_out, rows, size)), ("residual", _select(residual, rows, size))]
        self._runs.run("last", 0, size, inputs, [("logits", logits)])
        return logits[: len(rows)]

    def hidden(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor
    ) -> None:
        """Never called."""
        raise AssertionError("TensorRT keeps the hidden states to itself")

    def _run(
        self,
        segment: str,
        layer: int,
        size: int,
        inputs: list[Binding],
        qkv_out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Enqueues a segment for so many rows -> the rows of `residual`, or of a new one, that `qkv_out` has."""
        qkv = _with_rows_behind(qkv_out, size)
        outputs = [("qkv", qkv)]
        if residual is None:
            residual = torch.empty(size, self._config.hidden_size, dtype=qkv.dtype, device=qkv.device)
            outputs.append(("residual_out", residual))
        self._runs.run(segment, layer, size, inputs, outputs)
        if qkv.data_ptr() != qkv_out.data_ptr():
            qkv_out.copy_(qkv[: len(qkv_out)])
        return residual[: len(qkv_out)]


def _select(tensor: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
    """A copy of some rows (int64 [r]) with any others behind them: [n, width] -> [size, width]

    Of one row there is nothing to select. Of several, indexing copies faster than `index_select`.
    """
    if len(tensor) == len(rows) == size == 1:
        return tensor
    selected = tensor.new_empty(size, tensor.shape[1])
    if len(rows) == 1:
        torch.index_select(tensor, 0, rows, out=selected[:1])
    else:
        torch.ops.aten.index.Tensor_out(tensor, [rows], out=selected[: len(rows)])
    return selected


def _with_rows_behind(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The tensor with the rows that follow it in its memory, or a copy with others if there are too few.

    tensor: contiguous [n, width] -> [num_rows, width]
    """
    assert tensor.is_contiguous(), "other rows lie between its own"
    if len(tensor) == num_rows:
        return tensor
    width = tensor.shape[1]
    if tensor.storage_offset() + num_rows * width <= tensor.untyped_storage().nbytes() // tensor.itemsize:
        return tensor.as_strided((num_rows, width), (width, 1))
    padded = tensor.new_zeros(num_rows, width)
    padded[: len(tensor)] = tensor
    return padded


def profiles_of(plans: EnginePlans) -> list[Profile]:
    """Those of the segment that has plans of the most; the others may have plans of fewer large sizes."""
    return [cached.profile for cached in max(plans.values(), key=len)]


def _kept(engine: Engine, profile: Profile, device: torch.device) -> tuple[Binding, ...]:
    """Memory for the outputs that `onnx_forms.py` adds."""
    return tuple(
        (name, torch.empty(profile.high, *tensor.shape[1:], dtype=tensor.dtype, device=device))
        for name, tensor in engine.tensors().items()
        if name.startswith(KEPT)
    )


def _load_engine(api: TensorRT, cached: CachedEnginePlan, weights: Weights) -> Engine:
    """A plan that came from somewhere else must not read beyond the tensors it is given."""
    key = cached.record.key
    title = f"{key.title} ({key.plan_name})"
    engine = api.load(title, cached.plan)
    found = engine.tensors()
    for name, tensor in weights.items():
        expected = TensorType(tensor.dtype, tuple(tensor.shape))
        if found.get(name) != expected:
            raise ConfigError(f"the plan of {title} is of another model: {name} is {expected}, not {found.get(name)}")
    return engine


class ShapedContext:
    """An execution context, and the sizes that it is set to."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.sizes: Sizes | None = None  # None: not known

    def set_shapes(self, inputs: Sequence[tuple[str, torch.Tensor]], sizes: Sizes) -> bool:
        """Sets the shapes of the inputs if they differ from the present ones. False if TensorRT refuses one."""
        if self.sizes == sizes:
            return True
        self.sizes = None
        if not all(self.context.set_input_shape(name, tuple(tensor.shape)) for name, tensor in inputs):
            return False
        self.sizes = sizes
        return True


class EngineContexts:
    """Gives a context of one engine for each run. Uncaptured runs share one, captured ones have one for each size.

    A captured CUDA graph depends on the state of the context that it was captured from, so NVIDIA's documentation asks
    for one context per captured graph. Here a context belongs to the graphs of one size, and its shapes never change
    again. Such graphs set only addresses anew, which a capture has taken as arguments of its kernels.
    """

    def __init__(self, engine: Engine, memory: torch.Tensor, current_stream: Callable[[], int]) -> None:
        """`memory`: uint8, shared by all contexts, which must run one after another on one stream."""
        self._engine, self._memory, self._current_stream = engine, memory, current_stream
        self._captured: dict[Sizes, ShapedContext] = {}
        self._uncaptured: ShapedContext | None = self._create()

    def find(self, sizes: Sizes) -> ShapedContext:
        """The context for a run of these sizes on the current stream.

        While the stream is being captured, the last run must have had these sizes: TensorRT prepares new sizes with
        work that a graph cannot hold.
        """
        if not is_capturing():
            if self._uncaptured is None:
                self._uncaptured = self._create()
            return self._uncaptured
        captured = self._captured.get(sizes)
        if captured is None:
            captured, self._uncaptured = self._uncaptured, None
            assert captured is not None and captured.sizes == sizes, f"sizes {sizes} did not run before their capture"
            self._captured[sizes] = captured
        return captured

    def _create(self) -> ShapedContext:
        return ShapedContext(self._engine.create_context(self._memory, self._current_stream()))
