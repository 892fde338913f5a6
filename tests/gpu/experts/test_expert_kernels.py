"""The kernels of mixtures of experts against the torch reference, a loop over experts on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from services.common.families.shape import Activation, ClampedSwiglu, ExpertOptions, GroupedRouting
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear, RoutedExperts
from services.dense_worker.kernels.experts.router import (
    GroupedRouter,
    Router,
    ScaledRouter,
    SoftmaxRouter,
    SparseMixer,
)
from services.dense_worker.kernels.linear.linear import PlainWeight
from services.dense_worker.kernels.norm.norm import LayerNorm, Norm, RmsNorm, UnweightedRmsNorm
from services.dense_worker.parameters import Parameter, tensors_by_name, with_tensors
from tests.support.model_configs import small_config

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.experts.cuda_experts import CudaExperts
from services.dense_worker.kernels.experts.triton_few import few_router, few_shared_bytes
from services.dense_worker.kernels.experts.triton_router import PairBlocks, Routing, choose_experts
from services.dense_worker.kernels.triton_launch import KernelLauncher

CPU = torch.device("cpu")
# ‖out − reference‖ / ‖reference‖: the activation and each expert's product are rounded once, the sums differ in order.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HOPPER_SHARED_BYTES = 227 << 10
EPSILONS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Experts, experts of a token, hidden and intermediate size: multiples of all tiles, of none, loops of several steps.
SHAPES = {"8x2": (8, 2, 64, 32), "12x3 odd": (12, 3, 88, 40), "64x8": (64, 8, 128, 1100), "1x1": (1, 1, 64, 64)}
DEEPSEEK = GroupedRouting(num_groups=4, num_groups_per_token=2, multiplier=2.5, is_sigmoid=True)


def make_options(shape: str, grouped: GroupedRouting | None = None) -> tuple[ExpertOptions, int]:
    num_experts, num_per_token, hidden, intermediate = SHAPES[shape]
    return ExpertOptions(num_experts, num_per_token, intermediate, grouped is None, (0,), grouped=grouped), hidden


def make_experts(
    options: ExpertOptions,
    hidden: int,
    dtype: torch.dtype,
    has_bias: bool = False,
    clamped: ClampedSwiglu | None = None,
    activation: Activation = Activation.SILU,
) -> RoutedExperts:
    """On the CPU. With a clamped SwiGLU the router has a bias, too, as in gpt-oss; beside an MLP it is Gemma 4's."""
    generator = torch.Generator().manual_seed(0)

    def parameter(name: str, *shape: int, std: float = 1.0, dtype: torch.dtype = dtype) -> Parameter:
        return Parameter(name, (torch.randn(shape, generator=generator) * std).to(dtype))

    def linear(name: str, in_features: int, out_features: int) -> ExpertLinear:
        rows = options.num_experts * out_features
        weight = PlainWeight(parameter(f"{name}_weight", rows, in_features, std=in_features**-0.5))
        bias = parameter(f"{name}_bias", rows) if has_bias else None
        return ExpertLinear(name, options.num_experts, in_features, out_features, weight, bias)

    weight = parameter("router", options.num_experts, hidden, std=4 * hidden**-0.5)
    num_per_token, renormalizes = options.num_per_token, options.renormalizes
    router: Router = SoftmaxRouter(
        weight, num_per_token, renormalizes, parameter("logit_bias", options.num_experts) if clamped else None
    )
    if options.grouped is not None:
        bias = None
        if options.grouped.is_sigmoid:
            bias = parameter("router_bias", options.num_experts, dtype=torch.float32)
        router = GroupedRouter(weight, bias, num_per_token, renormalizes, options.grouped)
    if options.is_beside_mlp:
        scales = parameter("scale", hidden), parameter("expert_scale", options.num_experts)
        router = ScaledRouter(weight, num_per_token, *scales, UnweightedRmsNorm(1e-5))
    if options.mixer_jitter is not None:
        router = SparseMixer(weight, num_per_token, options.mixer_jitter)
    size = options.intermediate_size
    return RoutedExperts(router, linear("up", hidden, 2 * size), linear("down", size, hidden), activation, clamped)


@dataclass(frozen=True)
class FixedRouter:
    """Chooses what it was told."""

    num_per_token: int
    chosen: torch.Tensor
    weights: torch.Tensor

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.chosen, self.weights


class Pair:
    """The kernels and the reference, with the same weights."""

    def __init__(
        self, device: torch.device, options: ExpertOptions, hidden: int, dtype: torch.dtype, **more: Any
    ) -> None:
        self.reference = make_experts(options, hidden, dtype, **more)
        self.experts = with_tensors(self.reference, moved(tensors_by_name(self.reference), device))
        self.device, self.dtype, self.hidden, self.options = device, dtype, hidden, options
        config = replace(small_config("llama"), hidden_size=hidden)
        self.kernels = CudaExperts(make_launcher(device), config, options, 300, dtype, device)

    def check(self, found: torch.Tensor, x: torch.Tensor, shared: torch.Tensor | None = None) -> None:
        """Checks choices, weights and result for x [n, hidden], on the CPU.

        Two experts whose logits round to the same number may be exchanged: the result is that for the kernels' choice.
        """
        chosen = self.kernels._chosen[: len(x)].cpu().long()
        weights = self.kernels._weights[: len(x)].cpu()
        if self.options.grouped is None:
            self._check_softmax(x, chosen, weights)
        else:  # in float32
            expected_choice, expected_weights = self.reference.router.choose(x)
            assert torch.equal(chosen, expected_choice)
            torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
        router = FixedRouter(self.options.num_per_token, chosen, weights)
        expected = replace(self.reference, router=router).mix(x)
        if shared is not None:
            expected = expected + shared
        assert found.dtype == self.dtype
        assert (found.cpu().float() - expected).norm() < TOLERANCES[self.dtype] * expected.norm()

    def _check_softmax(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        router = self.reference.router
        logits = x.double() @ router.weight.data.double().t() + (0 if router.bias is None else router.bias.data)
        error = 2 * EPSILONS[self.dtype] * logits.abs().max()
        others = logits.scatter(1, chosen, -torch.inf).max(1).values
        assert (logits.gather(1, chosen).min(1).values >= others - error).all()
        scores = logits.softmax(1).gather(1, chosen)
        if self.options.renormalizes:
            scores /= scores.sum(1, keepdim=True)
        torch.testing.assert_close(weights.double(), scores, rtol=2 * error.item() + 1e-5, atol=0)

    def mix(self, x: torch.Tensor, shared: torch.Tensor | None = None) -> torch.Tensor:
        self.kernels.set_num_tokens(len(x))
        return self.kernels.mix(x.to(self.device), self.experts, None if shared is None else shared.to(self.device))


def moved(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def make_launcher(device: torch.device) -> KernelLauncher:
    launcher = KernelLauncher(device)
    if device.type == "cpu":
        launcher.shared_memory_bytes = HOPPER_SHARED_BYTES
    return launcher


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if kernel_device.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_of_the_chosen_experts_is_that_of_torch(
    kernel_device: torch.device, shape: str, dtype: torch.dtype
) -> None:
    pair = Pair(kernel_device, *make_options(shape), dtype)
    for num_tokens in (1, 2, 7, 40, 300) if kernel_device.type == "cuda" else (1, 2, 20):
        x = torch.randn(num_tokens, pair.hidden).to(dtype)
        pair.check(pair.mix(x), x)


@pytest.mark.parametrize("num_tokens", [1, 3, 33])
def test_clamped_swiglu_and_a_bias_of_the_router(
    kernel_device: torch.device, dtype: torch.dtype, num_tokens: int
) -> None:
    pair = Pair(kernel_device, *make_options("12x3 odd"), dtype, clamped=ClampedSwiglu(alpha=1.7, limit=0.9))
    x = 2 * torch.randn(num_tokens, pair.hidden)
    pair.check(pair.mix(x.to(dtype)), x.to(dtype))


@pytest.mark.parametrize("num_tokens", [1, 3, 33])
def test_biases_and_a_shared_expert_are_added(kernel_device: torch.device, dtype: torch.dtype, num_tokens: int) -> None:
    pair = Pair(kernel_device, *make_options("12x3 odd"), dtype, has_bias=True)
    x, shared = torch.randn(num_tokens, pair.hidden).to(dtype), torch.randn(num_tokens, pair.hidden)
    pair.check(pair.mix(x, shared), x, shared)


@pytest.mark.parametrize("num_tokens", [1, 3, 33])
def test_the_experts_of_gemma_4(kernel_device: torch.device, dtype: torch.dtype, num_tokens: int) -> None:
    """GeGLU, and a router that normalises and scales another tensor than the experts read; each expert has a factor."""
    options, hidden = make_options("12x3 odd")
    options = replace(options, is_beside_mlp=True)
    pair = Pair(kernel_device, options, hidden, dtype, activation=Activation.GELU_TANH)
    x, routed_by = (2 * torch.randn(2, num_tokens, hidden)).to(dtype)
    pair.kernels.set_num_tokens(num_tokens)
    found = pair.kernels.mix(x.to(kernel_device), pair.experts, None, routed_by.to(kernel_device)).cpu().float()
    chosen, weights = pair.kernels._chosen[:num_tokens].cpu().long(), pair.kernels._weights[:num_tokens].cpu()
    if dtype == torch.float32:  # in others experts whose logits round to the same number may be exchanged
        expected_choice, expected_weights = pair.reference.router.choose(routed_by)
        assert torch.equal(chosen, expected_choice)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    expected = replace(pair.reference, router=FixedRouter(options.num_per_token, chosen, weights)).mix(x)
    assert (found - expected).norm() < TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize("grouped", [DEEPSEEK, replace(DEEPSEEK, num_groups=1, num_groups_per_token=1)])
@pytest.mark.parametrize("is_sigmoid", [True, False])
@pytest.mark.parametrize("renormalizes", [True, False])
def test_the_router_is_that_of_torch(
    kernel_device: torch.device, grouped: GroupedRouting, is_sigmoid: bool, renormalizes: bool
) -> None:
    options, hidden = make_options("12x3 odd", replace(grouped, is_sigmoid=is_sigmoid))
    pair = Pair(kernel_device, replace(options, renormalizes=renormalizes), hidden, torch.float32)
    for num_tokens in (1, 30):
        x = torch.randn(num_tokens, pair.hidden)
        pair.check(pair.mix(x), x)


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_experts_that_are_chosen_one_after_the_other(kernel_device: torch.device, jitter: float) -> None:
    """The weights of the second and third expert are softmaxes of what is left; with 0.3 some experts count in both."""
    options, hidden = make_options("12x3 odd")
    pair = Pair(kernel_device, replace(options, mixer_jitter=jitter), hidden, torch.float32)
    for num_tokens in (1, 30):
        x = torch.randn(num_tokens, hidden)
        found = pair.mix(x).cpu()
        chosen, weights = (each[:num_tokens].cpu() for each in (pair.kernels._chosen, pair.kernels._weights))
        expected_choice, expected_weights = pair.reference.router.choose(x)
        assert torch.equal(chosen.long(), expected_choice)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
        expected = pair.reference.mix(x)
        assert (found - expected).norm() < TOLERANCES[torch.float32] * expected.norm()


def test_every_pair_has_one_slot_whatever_the_choices(kernel_device: torch.device) -> None:
    """Also if all tokens choose the same experts, and if logits are NaN or infinite."""
    num_experts, num_tokens, num_per_token, block_rows = 12, 40, 3, 16
    logits = torch.randn(num_tokens, num_experts)
    logits[:20] = torch.arange(num_experts).flip(0)
    logits[30] = float("nan")
    logits[31, ::2] = float("-inf")
    blocks = PairBlocks(num_experts, 50, 40, kernel_device)
    chosen = torch.empty(num_tokens, num_per_token, dtype=torch.int32, device=kernel_device)
    weights = torch.empty(num_tokens, num_per_token, device=kernel_device)
    loads = torch.full((num_experts,), 5, dtype=torch.int64, device=kernel_device)
    num_valid = torch.tensor([35], dtype=torch.int32, device=kernel_device)
    for repeat in (1, 2):  # the counters begin at zero again
        choose_experts(
            make_launcher(kernel_device), logits.to(kernel_device), None, Routing(num_per_token, True, None), num_valid,
            chosen, weights, loads, blocks, block_rows,
        )  # fmt: skip
        experts = chosen[:35].long().cpu()
        assert all(len(set(row)) == num_per_token for row in experts.tolist())
        counts = torch.bincount(experts.flatten(), minlength=num_experts)
        assert torch.equal(blocks.counts.cpu().long(), counts)
        assert torch.equal(loads.cpu(), 5 + repeat * counts)
        for expert, count in enumerate(counts.tolist()):
            pairs = (experts.flatten() == expert).nonzero()[:, 0].tolist()
            assert sorted(blocks.slots[expert, :count].tolist()) == pairs
        num_blocks = int(blocks.num_blocks)
        listed = zip(blocks.experts[:num_blocks].tolist(), blocks.first_slots[:num_blocks].tolist(), strict=True)
        expected = [(e, first) for e, count in enumerate(counts.tolist()) for first in range(0, count, block_rows)]
        assert sorted(listed) == expected
    assert weights[30].isnan().all() and torch.isfinite(weights[:30]).all()


def test_padding_chooses_no_expert_and_becomes_zero(kernel_device: torch.device) -> None:
    pair = Pair(kernel_device, *make_options("8x2"), torch.float32)
    for num_tokens, num_rows in ((1, 1), (5, 16), (0, 1), (17, 32)):
        x = torch.randn(num_rows, pair.hidden)
        pair.kernels.set_num_tokens(num_tokens)
        found = pair.kernels.mix(x.to(kernel_device), pair.experts, None)
        if num_tokens:
            pair.check(found[:num_tokens], x[:num_tokens])
        assert not found[num_tokens:].any()
        if num_rows > 1:
            assert int(pair.kernels._blocks.counts.sum()) == 2 * num_tokens


@pytest.mark.parametrize(("shape", "num_tokens"), [("8x2", 1), ("12x3 odd", 1), ("64x8", 2)])
def test_few_tokens_have_the_norm_before_and_the_addition_after_in_the_kernels(
    kernel_device: torch.device, shape: str, num_tokens: int, dtype: torch.dtype
) -> None:
    pair = Pair(kernel_device, *make_options(shape), dtype, has_bias=True)
    kernels, experts, hidden = pair.kernels, pair.experts, pair.hidden
    assert kernels.has_few(experts, num_tokens) and not kernels.has_few(experts, num_tokens + 1)
    residual = torch.randn(num_tokens, hidden).to(dtype)
    gain, bias = (Parameter(name, (1 + torch.randn(hidden) / 4).to(dtype)) for name in ("gain", "bias"))
    norms: tuple[Norm | None, ...] = (RmsNorm(gain, 1e-5), LayerNorm(gain, bias, 1e-5), None)
    for norm in norms:
        x = residual if norm is None else norm.normalize(residual)
        on_device = None if norm is None else with_tensors(norm, moved(tensors_by_name(norm), kernel_device))
        before = residual.to(kernel_device)
        workspace, change = torch.empty_like(before), torch.empty_like(before)
        kernels.set_num_tokens(num_tokens)
        kernels.activate_few(before, on_device, experts, workspace)
        kernels.add_few(experts, None, change)
        pair.check(change, x)
        after = before.clone()
        kernels.add_few(experts, after, after)
        assert torch.equal(after, before + change)


def test_padding_of_few_tokens_leaves_the_residual_and_reads_nothing(kernel_device: torch.device) -> None:
    pair = Pair(kernel_device, *make_options("64x8"), torch.float32)
    pair.kernels._activation.fill_(torch.nan)
    pair.kernels._weights.fill_(torch.nan)
    x = torch.randn(2, pair.hidden)
    residual = torch.randn(2, pair.hidden).to(kernel_device)
    pair.kernels.set_num_tokens(1)
    pair.kernels.activate_few(x.to(kernel_device), None, pair.experts, torch.empty(0, device=kernel_device))
    after = residual.clone()
    pair.kernels.add_few(pair.experts, after, after)
    pair.check((after - residual)[:1], x[:1])
    assert torch.equal(after[1], residual[1])


def test_experts_of_few_tokens_are_counted_once(kernel_device: torch.device) -> None:
    pair = Pair(kernel_device, *make_options("64x8"), torch.float32)
    loads = torch.full((64,), 5, dtype=torch.int64, device=kernel_device)
    experts = replace(pair.experts, loads=loads)
    pair.kernels.set_num_tokens(1)
    for _ in range(2):
        pair.kernels.mix(torch.randn(2, pair.hidden).to(kernel_device), experts, None)
    assert int(loads.sum()) == 5 * 64 + 2 * 8


@pytest.mark.parametrize("num_experts", [12, 128, 144])
@pytest.mark.parametrize("grouped", [None, replace(DEEPSEEK, is_sigmoid=False), DEEPSEEK])
def test_few_tokens_choose_by_the_same_rule_as_many(
    kernel_device: torch.device, num_experts: int, grouped: GroupedRouting | None
) -> None:
    """The first of equal experts, and others if logits are NaN or infinite. The logits are a column of the weights."""
    num_tokens, num_per_token, hidden = 6, 5, 16
    logits = torch.randn(num_tokens, num_experts)
    logits[1] = torch.arange(num_experts) // 3 % 3
    logits[2] = 0.0
    logits[3] = float("nan")
    logits[4, ::2] = float("-inf")
    logits[5, 7] = float("nan")
    launcher, routing = make_launcher(kernel_device), Routing(num_per_token, True, grouped)
    blocks = PairBlocks(num_experts, num_tokens, num_experts + 8, kernel_device)
    expected = torch.empty(num_tokens, num_per_token, dtype=torch.int32, device=kernel_device)
    expected_weights = torch.empty(num_tokens, num_per_token, device=kernel_device)
    on_device = logits.to(kernel_device)
    choose_experts(launcher, on_device, None, routing, None, expected, expected_weights, None, blocks, 16)
    x = torch.zeros(1, hidden, device=kernel_device)
    x[0, 0] = 1.0
    for row in range(num_tokens):
        weight = torch.zeros(num_experts, hidden, device=kernel_device)
        weight[:, 0] = on_device[row]
        found, weights = torch.full_like(expected[:1], -1), torch.empty_like(expected_weights[:1])
        workspace, num_done = torch.empty(1, num_experts, device=kernel_device), torch.zeros_like(found[0, :1])
        few_router(
            launcher, x, None, None, weight, None, workspace, num_done, None, routing, None, found, weights, None,
            None, is_rounded=False,
        )  # fmt: skip
        assert len(set(found[0].tolist())) == num_per_token and int(num_done) == 0
        assert torch.equal(found[0], expected[row])
        torch.testing.assert_close(weights[0], expected_weights[row], rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 200])
def test_one_graph_serves_every_routing(num_tokens: int, dtype: torch.dtype) -> None:
    pair = Pair(torch.device("cuda"), *make_options("64x8"), dtype)
    x = torch.randn(num_tokens, pair.hidden, device="cuda").to(dtype)
    replay, found = capture(lambda: pair.kernels.mix(x, pair.experts, None))
    for seed in range(4):
        # The first rounds send all tokens to the same few experts, the others to different ones.
        generator = torch.Generator().manual_seed(seed)
        new = torch.randn(1 if seed < 2 else num_tokens, pair.hidden, generator=generator).to(dtype)
        x.copy_(new.expand(num_tokens, -1))
        pair.kernels.set_num_tokens(num_tokens)
        replay()
        pair.check(found, x.cpu())


def capture(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Captures `run`; returns what replays it, and its result."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
    torch.cuda.synchronize()
    return graph.replay, found


@pytest.mark.parametrize("hidden", [88, 2048, 2880, 4096, 7168, 12288])
def test_programs_of_few_pairs_fit_on_a_hopper_or_are_not_used(hidden: int, dtype: torch.dtype) -> None:
    is_long = 8 * 1024 <= 16 * hidden <= 16 * 4096 or hidden > 8192
    fits = few_shared_bytes(hidden, dtype) <= HOPPER_SHARED_BYTES
    assert fits == (dtype != torch.float32 or not is_long)
