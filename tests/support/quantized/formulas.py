"""Quantizers in numpy, written from the descriptions of the formats. They share nothing with the services."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

E4M3 = ml_dtypes.float8_e4m3fn
E4M3_MAX, INT8_MAX = 448.0, 127.0
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output channel that each nibble of a word holds


@dataclass(frozen=True)
class Quantized:
    """A projection as a checkpoint stores it, and what that means."""

    tensors: dict[str, torch.Tensor]  # by the rest of the name, such as "weight_scale"
    matrix: np.ndarray  # float64 [out_features, in_features], dequantized


def e4m3(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest FP8 number, as float64."""
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(np.float32).astype(E4M3).astype(np.float64)


def int8(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest integer, half to even."""
    return np.clip(np.rint(values), -128, INT8_MAX)


def as_e4m3(values: np.ndarray) -> torch.Tensor:
    """Numbers that FP8 can hold, as a tensor of it."""
    return torch.from_numpy(values.astype(np.float32).astype(E4M3).view(np.uint8)).view(torch.float8_e4m3fn)


def scaled(w: np.ndarray, element: str, per: str, name: str = "weight_scale", shape: tuple | None = None) -> Quantized:
    """One scale for the tensor or for each channel; `element` is "fp8" or "int8"."""
    greatest, to_codes = (E4M3_MAX, e4m3) if element == "fp8" else (INT8_MAX, int8)
    axis = 1 if per == "channel" else None
    scale = (np.abs(w).max(axis=axis, keepdims=True) / greatest).astype(np.float32)
    codes = to_codes(w / scale)
    stored = as_e4m3(codes) if element == "fp8" else torch.from_numpy(codes.astype(np.int8))
    shape = shape if shape is not None else (len(w), 1) if per == "channel" else (1,)
    return Quantized({"weight": stored, name: torch.from_numpy(scale.reshape(shape))}, codes * scale)


def blocks(w: np.ndarray, size: int = 128, name: str = "weight_scale_inv") -> Quantized:
    """A scale for each block of `size` x `size`; the last ones may be smaller."""
    starts = [range(0, length, size) for length in w.shape]
    scale, codes, matrix = np.zeros(list(map(len, starts)), np.float32), np.zeros_like(w), np.zeros_like(w)
    for i, row in enumerate(starts[0]):
        for j, column in enumerate(starts[1]):
            place = np.s_[row : row + size, column : column + size]
            scale[i, j] = np.abs(w[place]).max() / E4M3_MAX
            codes[place] = e4m3(w[place] / scale[i, j])
            matrix[place] = codes[place] * scale[i, j]
    return Quantized({"weight": as_e4m3(codes), name: torch.from_numpy(scale)}, matrix)


def grouped(
    w: np.ndarray, num_bits: int, group_of: np.ndarray, is_symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes from 0 on [out, in], scales and zero points [out, groups], and the dequantized matrix."""
    top, num_groups = 2**num_bits - 1, group_of.max() + 1
    scale = np.zeros((len(w), num_groups), np.float32)
    zero = np.zeros((len(w), num_groups), np.int64)
    for group in range(num_groups):
        members = w[:, group_of == group]
        if is_symmetric:
            scale[:, group] = np.abs(members).max(axis=1) / (top / 2)
            zero[:, group] = (top + 1) // 2
        else:
            low, high = np.minimum(members.min(axis=1), 0), np.maximum(members.max(axis=1), 0)
            scale[:, group] = (high - low) / top
            zero[:, group] = np.rint(-low / scale[:, group])
    codes = np.clip(np.rint(w / scale[:, group_of]) + zero[:, group_of], 0, top).astype(np.int64)
    return codes, scale, zero, (codes - zero[:, group_of]) * scale[:, group_of].astype(np.float64)


def in_words(codes: np.ndarray, num_bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [rows, n] -> int32 [rows, ceil(n * num_bits / 32)]: code order[i] of a word is at bit i * num_bits."""
    per_word = 32 // num_bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word))).reshape(len(codes), -1, per_word)
    words = np.zeros(padded.shape[:2], np.uint64)
    for i, position in enumerate(order or range(per_word)):
        words |= padded[:, :, position].astype(np.uint64) << np.uint64(i * num_bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def groups_of(num_features: int, group_size: int, seed: int | None = None) -> np.ndarray:
    """The group of each input feature; with a seed in random order, as act-order leaves them."""
    groups = np.arange(num_features) // (num_features if group_size == -1 else group_size)
    return groups if seed is None else np.random.default_rng(seed).permutation(groups)


def pack_quantized(
    w: np.ndarray, num_bits: int, group_size: int, is_symmetric: bool, seed: int | None = None
) -> Quantized:
    """As compressed-tensors writes it."""
    group_of = groups_of(w.shape[1], group_size, seed)
    codes, scale, zero, matrix = grouped(w, num_bits, group_of, is_symmetric)
    tensors = {
        "weight_packed": in_words(codes, num_bits),
        "weight_scale": torch.from_numpy(scale),
        "weight_shape": torch.tensor(w.shape),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = in_words(zero.T, num_bits).t().contiguous()
    if seed is not None:
        tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return Quantized(tensors, matrix)


def awq(w: np.ndarray, group_size: int) -> Quantized:
    """As AutoAWQ writes it: version "gemm", with zero points."""
    codes, scale, zero, matrix = grouped(w, 4, groups_of(w.shape[1], group_size), False)
    tensors = {
        "qweight": in_words(codes.T, 4, AWQ_ORDER),
        "qzeros": in_words(zero.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scale.T.copy()),
    }
    return Quantized(tensors, matrix)


def gptq(
    w: np.ndarray, num_bits: int, group_size: int, is_symmetric: bool, seed: int | None = None, version: int = 1
) -> Quantized:
    """As AutoGPTQ (version 1) and GPTQModel (version 2) write it."""
    group_of = groups_of(w.shape[1], group_size, seed)
    codes, scale, zero, matrix = grouped(w, num_bits, group_of, is_symmetric)
    stored_zero = (zero - (version == 1)) % 2**num_bits
    tensors = {
        "qweight": in_words(codes, num_bits).t().contiguous(),
        "qzeros": in_words(stored_zero.T, num_bits),
        "scales": torch.from_numpy(scale.T.copy()),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return Quantized(tensors, matrix)


def mxfp4(w: np.ndarray, is_compressed_tensors: bool = False) -> Quantized:
    """The OCP Microscaling format, by ml_dtypes' E2M1; the scale is the power of two below the greatest value / 4."""
    groups = w.reshape(len(w), -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(axis=2))) - 2
    elements = np.clip(groups / 2.0 ** exponent[:, :, None], -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    nibbles = elements.view(np.uint8) & 15
    packed = torch.from_numpy(nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4)
    scale = torch.from_numpy((exponent + 127).astype(np.uint8))
    matrix = (elements.astype(np.float64) * 2.0 ** exponent[:, :, None]).reshape(w.shape)
    if is_compressed_tensors:
        return Quantized({"weight_packed": packed.flatten(1), "weight_scale": scale}, matrix)
    return Quantized({"weight_blocks": packed, "weight_scales": scale}, matrix)


def input_by_token(x: np.ndarray, element: str, max_activation: float = np.inf) -> np.ndarray:
    """The input with a scale for each token, dequantized again. The greatest value becomes half of the range.

    In INT8 that is 127.5, which lies between two codes. So this divides in float32, as the formats say.
    """
    greatest, to_codes = (E4M3_MAX, e4m3) if element == "fp8" else (127.5, int8)
    x = x.astype(np.float32)
    scale = np.clip(np.abs(x).max(axis=-1, keepdims=True), 1e-12, max_activation) / np.float32(greatest)
    return to_codes(x / scale).astype(np.float64) * scale


def input_by_constant(x: np.ndarray, element: str, scale: float) -> np.ndarray:
    """The input with a scale from the checkpoint, dequantized again."""
    return (e4m3 if element == "fp8" else int8)(x / scale) * scale


def input_by_group(x: np.ndarray, size: int = 128) -> np.ndarray:
    """The input with a scale for each token and group of features, dequantized again."""
    parts = [input_by_token(x[..., at : at + size], "fp8") for at in range(0, x.shape[-1], size)]
    return np.concatenate(parts, axis=-1)
