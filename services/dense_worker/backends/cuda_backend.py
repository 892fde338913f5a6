"""The segments on CUDA with fused kernels: what `segments.py` defines, in fewer passes over memory.

Owned by the engine thread. All work goes to the current stream, at fixed addresses and without waiting, so
that a step can be captured in a CUDA graph; see `CudaBackend` for what a capture must do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.common.model_config import ModelConfig
from services.dense_worker.backends.linear_choice import ROW_BUCKETS, LinearChoice, LinearKernel
from services.dense_worker.backends.triton_activation import silu_mul
from services.dense_worker.backends.triton_gemv import MAX_IN_FEATURES, gemv
from services.dense_worker.backends.triton_launch import KernelLauncher
from services.dense_worker.backends.triton_norm import add_rms_norm, head_rms_norm
from services.dense_worker.backends.triton_skinny import SplitWorkspace, skinny_linear
from services.dense_worker.model.weights import LayerWeights, ModelWeights

_STREAMED_DTYPES = (torch.bfloat16, torch.float16)
_MEASURED_LAYERS = 8  # of a step that is timed
_STREAMED_SHARED_BYTES = 192 << 10  # of the streaming kernels' largest tiles, sized for Hopper


class CudaBackend:
    """A DenseBackend for CUDA in float32, bfloat16 or float16, for one thread and one step at a time.

    The constructor compiles the kernels and measures which are faster (`LinearChoice`), in seconds; it waits
    for the device. After it nothing does.

    Activations lie in workspaces for `max_num_tokens` tokens, at the same addresses in every step. Only
    `last` allocates: the logits, the caller's to keep, and the rows it needs; under capture they come from
    the graph's pool. A captured step serves exactly the number of tokens it was captured with.
    """

    def __init__(self, weights: ModelWeights, config: ModelConfig, max_num_tokens: int) -> None:
        self._weights, self._config = weights, config
        dtype, device = weights.embed.dtype, weights.embed.device

        def workspace(width: int) -> torch.Tensor:
            return torch.empty(max_num_tokens, width, dtype=dtype, device=device)

        self._residual = workspace(config.hidden_size)  # from `first` to `last`
        self._hidden = workspace(config.hidden_size)  # normalised, or about to be added to the residual
        self._gate_up = workspace(2 * config.intermediate_size)
        self._launcher = KernelLauncher(device)
        self._splits = SplitWorkspace(device, self._launcher.num_sms)
        self._choice = LinearChoice()
        if dtype in _STREAMED_DTYPES and self._launcher.shared_memory_bytes >= _STREAMED_SHARED_BYTES:
            self._choose_kernels(max_num_tokens)
        for num_tokens in _step_sizes(max_num_tokens):  # no later step compiles a kernel or loads a library
            self._random_step(num_tokens)()

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """See DenseBackend."""
        residual = self._residual[: len(token_ids)]
        torch.index_select(self._weights.embed, 0, token_ids, out=residual)
        self._enter_layer(0, residual, None, qkv_out)

    def middle(self, layer: int, attn_out: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """See DenseBackend."""
        residual = self._residual[: len(attn_out)]
        delta = self._leave_layer(self._weights.layers[layer], attn_out, residual)
        self._enter_layer(layer + 1, residual, delta, qkv_out)

    def last(self, attn_out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See DenseBackend."""
        weights = self._weights
        logits = torch.empty(len(rows), self._config.vocab_size, dtype=torch.float32, device=attn_out.device)
        if len(rows):
            residual = self._residual[: len(attn_out)].index_select(0, rows)
            delta = self._leave_layer(weights.layers[-1], attn_out.index_select(0, rows), residual)
            self._norm_linear(residual, delta, weights.final_norm, weights.lm_head, None, logits)
        return logits

    def residual(self, num_tokens: int) -> torch.Tensor:
        """The residual of a step of so many tokens, [num_tokens, hidden]; to be read or replaced between calls."""
        return self._residual[:num_tokens]

    def _enter_layer(
        self, layer: int, residual: torch.Tensor, delta: torch.Tensor | None, qkv_out: torch.Tensor
    ) -> None:
        """Norm, merged projection, q/k norm; `delta` is what must yet be added to the residual."""
        w, config = self._weights.layers[layer], self._config
        self._norm_linear(residual, delta, w.input_norm, w.qkv_weight, w.qkv_bias, qkv_out)
        if w.q_norm is not None and w.k_norm is not None:
            heads = config.num_heads, config.num_kv_heads
            head_rms_norm(self._launcher, qkv_out, w.q_norm, w.k_norm, *heads, config.rms_norm_eps)

    def _leave_layer(self, w: LayerWeights, attn_out: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """o_proj and MLP; returns what must yet be added to the residual."""
        delta = self._linear_add(attn_out, w.o_weight, w.o_bias, residual)
        activation = self._norm_gate_up(residual, delta, w.post_norm, w.gate_up_weight, w.gate_up_bias)
        return self._linear_add(activation, w.down_weight, w.down_bias, residual)

    def _norm_linear(
        self,
        residual: torch.Tensor,  # [n, hidden]
        delta: torch.Tensor | None,
        norm_weight: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,  # [n, out_features], the model's dtype or float32
    ) -> None:
        num_rows = len(residual)
        is_streamed = self._choice.kernel(weight, num_rows) is LinearKernel.STREAMED
        if is_streamed and num_rows == 1 and delta is None:
            eps = self._config.rms_norm_eps
            gemv(self._launcher, residual, weight, bias, out, norm_weight=norm_weight, eps=eps)
            return
        normed = self._norm(residual, delta, norm_weight)
        if not is_streamed:
            _linear(normed, weight, bias, out)
        elif num_rows == 1:
            gemv(self._launcher, normed, weight, bias, out)
        else:
            skinny_linear(self._launcher, normed, weight, bias, out, self._splits)

    def _norm_gate_up(
        self,
        residual: torch.Tensor,  # [n, hidden]
        delta: torch.Tensor | None,
        norm_weight: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """SiLU(gate) * up [n, intermediate], in the left half of the workspace."""
        num_rows = len(residual)
        gate_up = self._gate_up[:num_rows]
        activation = gate_up[:, : self._config.intermediate_size]
        is_streamed = self._choice.kernel(weight, num_rows) is LinearKernel.STREAMED
        if is_streamed and num_rows == 1 and delta is None:
            eps = self._config.rms_norm_eps
            gemv(self._launcher, residual, weight, bias, activation, norm_weight=norm_weight, eps=eps, is_gated=True)
            return activation
        normed = self._norm(residual, delta, norm_weight)
        if not is_streamed:
            _linear(normed, weight, bias, gate_up)
            silu_mul(self._launcher, gate_up, activation)
        elif num_rows == 1:
            gemv(self._launcher, normed, weight, bias, activation, is_gated=True)
        else:
            skinny_linear(self._launcher, normed, weight, bias, activation, self._splits, is_gated=True)
        return activation

    def _linear_add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """Add the layer to the residual, or return what the next norm is to add."""
        num_rows = len(x)
        if self._choice.kernel(weight, num_rows) is LinearKernel.CUBLAS:
            return _linear(x, weight, bias, self._hidden[:num_rows])
        if num_rows == 1:
            gemv(self._launcher, x, weight, bias, residual, residual=residual)
        else:
            skinny_linear(self._launcher, x, weight, bias, residual, self._splits, residual=residual)
        return None

    def _norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        normed = self._hidden[: len(residual)]
        add_rms_norm(self._launcher, residual, delta, weight, self._config.rms_norm_eps, normed)
        return normed

    def _choose_kernels(self, max_num_tokens: int) -> None:
        layer = self._weights.layers[0]
        weights = [layer.qkv_weight, layer.o_weight, layer.gate_up_weight, layer.down_weight, self._weights.lm_head]
        weights = [weight for weight in weights if weight.shape[1] <= MAX_IN_FEATURES]
        self._choice.set_all(weights, LinearKernel.STREAMED)
        with self._launcher.compiling():
            for num_tokens in _step_sizes(max_num_tokens):
                self._random_step(num_tokens)()
        for num_tokens in ROW_BUCKETS:
            if num_tokens <= max_num_tokens:
                self._choice.measure(weights, num_tokens, self._random_step(num_tokens))

    def _random_step(self, num_tokens: int) -> Callable[[], None]:
        """A decode step through some of the layers; on random inputs, since on zeros a GPU is faster."""
        config, dtype, device = self._config, self._residual.dtype, self._residual.device
        token_ids = torch.randint(config.vocab_size, (num_tokens,), device=device)
        qkv = torch.empty(num_tokens, config.qkv_size, dtype=dtype, device=device)
        attn_out = torch.randn(num_tokens, config.attn_size, dtype=dtype, device=device)
        rows = torch.arange(num_tokens, device=device)

        def run() -> None:
            self.first(token_ids, qkv)
            for layer in range(min(config.num_layers, _MEASURED_LAYERS) - 1):
                self.middle(layer, attn_out, qkv)
            self.last(attn_out, rows)

        return run


def _step_sizes(max_num_tokens: int) -> list[int]:
    """Numbers of tokens that together run every kernel."""
    return sorted({min(size, max_num_tokens) for size in (*ROW_BUCKETS, ROW_BUCKETS[-1] + 1)})


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """By cuBLAS: x [n, in_features], weight [out_features, in_features] -> `out`, rounded to x's dtype."""
    if out.dtype != x.dtype:
        return out.copy_(torch.nn.functional.linear(x, weight, bias))
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
