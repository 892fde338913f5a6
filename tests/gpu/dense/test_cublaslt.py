"""Products by the candidates of cuBLASLt's heuristics equal those in float64, also in a graph and for strided rows."""

from __future__ import annotations

import pytest
import torch

from services.dense_worker.kernels.linear.cublaslt import CublasLt

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# A sum in float32, rounded once: to half a unit in the last place of the largest values, with room for the order.
TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


def operands(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x and out are the first columns of wider rows."""
    x = torch.randn(num_rows, in_features + 64, device=CUDA).to(dtype)[:, :in_features]
    matrix = (torch.randn(out_features, in_features, device=CUDA) * in_features**-0.5).to(dtype)
    return x, matrix, torch.full((num_rows, out_features + 32), 7.0, dtype=dtype, device=CUDA)[:, :out_features]


def check(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    tolerance = TOLERANCES[x.dtype]
    torch.testing.assert_close(out.double(), x.double() @ matrix.double().t(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(4096, 4096), (1536, 11008), (22016, 512)])
@pytest.mark.parametrize("num_rows", [72, 240, 512])
def test_each_candidate_multiplies(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    library, (x, matrix, out) = CublasLt(CUDA), operands(num_rows, out_features, in_features, dtype)
    candidates = library.candidates(x, matrix, out, 8)
    assert len(candidates) > 1
    for candidate in candidates:
        out.zero_()
        library.multiply(candidate, x, matrix, out)
        check(x, matrix, out)


def test_a_candidate_is_captured() -> None:
    library, (x, matrix, out) = CublasLt(CUDA), operands(240, 4096, 4096, torch.bfloat16)
    candidate = library.candidates(x, matrix, out, 1)[0]
    library.multiply(candidate, x, matrix, out)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        library.multiply(candidate, x, matrix, out)
    x.copy_(torch.randn_like(x))
    graph.replay()
    check(x, matrix, out)
