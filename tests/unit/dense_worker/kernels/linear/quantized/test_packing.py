"""Properties of packing, of scales, and of the rounding of activations, against numpy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from services.common.errors import ModelError
from services.common.quantization.schemes import Element
from services.dense_worker.kernels.linear.quantized.activations import rounded, rounded_by_groups, to_codes, token_scale
from services.dense_worker.kernels.linear.quantized.grouped_int_weight import pack, unpack, unpack_awq
from services.dense_worker.kernels.linear.quantized.layer import checked_scales
from services.dense_worker.kernels.linear.quantized.mxfp4_weight import Mxfp4Weight
from services.dense_worker.parameters import Loaded, Parameter
from tests.support.quantized.formulas import AWQ_ORDER, E4M3, in_words, input_by_group, input_by_token

torch.set_num_threads(1)
FINITE = st.floats(-6e4, 6e4, width=32)
MATRICES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=FINITE)


def codes_of(num_bits: int) -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda words: words * 32 // num_bits))
    return hnp.arrays(np.uint8, shapes, elements=st.integers(0, 2**num_bits - 1))


@settings(deadline=None)
@given(codes_of(4))
def test_four_bits_come_back_from_words(codes: np.ndarray) -> None:
    words = in_words(codes, 4)
    assert torch.equal(unpack(words, 4), torch.from_numpy(codes))
    assert torch.equal(pack(torch.from_numpy(codes), 4), words)
    assert torch.equal(unpack_awq(in_words(codes, 4, AWQ_ORDER)), torch.from_numpy(codes))


@settings(deadline=None)
@given(codes_of(8))
def test_eight_bits_come_back_from_words(codes: np.ndarray) -> None:
    words = in_words(codes, 8)
    assert torch.equal(unpack(words, 8), torch.from_numpy(codes))
    assert torch.equal(pack(torch.from_numpy(codes), 8), words)


@settings(deadline=None)
@given(MATRICES)
def test_a_token_is_rounded_to_the_nearest_numbers_of_its_scale(x: np.ndarray) -> None:
    for element in Element:
        scale = token_scale(torch.from_numpy(x), element)
        assert scale.shape == (len(x), 1) and (scale > 0).all()
        found = rounded(torch.from_numpy(x), scale, element).double().numpy()
        greatest = np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-12)
        # Half a step between codes: 16 at 448 in FP8 and 0.5 at 127.5, for the greatest value of the token.
        step = 16 / 448 if element is Element.FP8 else 0.5 / 127.5
        assert (np.abs(found - x) <= greatest * step * 1.001).all()
        assert (np.abs(found) <= greatest * 1.005).all()


@settings(deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)))
def test_codes_are_those_of_ml_dtypes_and_numpy(x: np.ndarray) -> None:
    one = torch.ones(())
    fp8 = to_codes(torch.from_numpy(x), one, Element.FP8).view(torch.uint8).numpy()
    assert np.array_equal(fp8, np.clip(x, -448, 448).astype(E4M3).view(np.uint8))
    int8 = to_codes(torch.from_numpy(x), one, Element.INT8).numpy()
    assert np.array_equal(int8, np.clip(np.rint(x), -128, 127).astype(np.int8))


@pytest.mark.parametrize("num_features", [1, 127, 128, 129, 300])
def test_groups_of_features_have_their_own_scales(num_features: int) -> None:
    x = torch.randn(3, num_features, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, num_features)
    expected = torch.from_numpy(input_by_group(x.double().numpy()))
    torch.testing.assert_close(rounded_by_groups(x, 128).double(), expected, rtol=1e-6, atol=0)


def test_values_above_the_bound_are_cut_off() -> None:
    x = torch.tensor([[0.5, -3.0, 2.0]])
    found = rounded(x, token_scale(x, Element.FP8, 2.0), Element.FP8)
    assert found.tolist() == [[0.5, -2.0, 2.0]]
    assert np.allclose(found.numpy(), input_by_token(x.numpy(), "fp8", 2.0))


def test_a_token_of_zeros_stays_zero() -> None:
    for element in Element:
        assert rounded(torch.zeros(2, 8), token_scale(torch.zeros(2, 8), element), element).tolist() == [[0.0] * 8] * 2


def test_mxfp4_has_the_numbers_of_ml_dtypes() -> None:
    codes, exponents = np.arange(16, dtype=np.uint8), np.array([[0, 1, 127, 130, 254]], np.uint8)
    groups = np.tile(codes, (1, 2 * exponents.size))
    packed = torch.from_numpy(groups[:, 0::2] | groups[:, 1::2] << 4)
    weight = Mxfp4Weight(Parameter("w", packed), Parameter("w_exponent", torch.from_numpy(exponents)))
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    expected = np.concatenate([np.tile(values, 2) * scale for scale in scales[0]])
    with np.errstate(over="ignore"):
        # 2 ** 127 times 2 and more is beyond float32.
        assert np.array_equal(weight.dequantize(torch.float32).numpy()[0], expected.astype(np.float32))


@settings(deadline=None)
@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=5), elements=st.floats(width=32)))
def test_scales_are_accepted_if_all_are_finite_and_above_zero(scales: np.ndarray) -> None:
    loaded = Loaded("a.weight_scale", torch.from_numpy(scales))
    if np.all(np.isfinite(scales) & (scales > 0)):
        assert torch.equal(checked_scales(loaded), torch.from_numpy(scales))
    else:
        with pytest.raises(ModelError, match=r"a\.weight_scale holds the scale"):
            checked_scales(loaded)


def test_a_scale_that_the_models_dtype_cannot_hold_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a\.scales holds the scale inf at \[1\] \(100000\.0 as stored\)"):
        checked_scales(Loaded("a.scales", torch.tensor([1.0, 1e5])), torch.float16)
