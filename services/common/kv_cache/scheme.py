"""What a checkpoint's files say about the precision of its KV cache.

compressed-tensors writes `kv_cache_scheme` into the `quantization_config` of config.json; ModelOpt writes the same, or
`kv_cache_quant_algo`, there or in hf_quant_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.json_files.read_json import read_json

FP8_SCHEME = "fp8"
_PLACES = (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization"))
# Fields of compressed-tensors, with the values that mean e4m3 with one static scale for a layer's keys, or values. A
# field may be missing.
_FP8_FIELDS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def read_kv_cache_scheme(path: Path) -> str | None:
    """The scheme that the checkpoint in the directory `path` asks for; None if it asks for none.

    `FP8_SCHEME` is e4m3 with static scales per tensor. Any other scheme is returned as the checkpoint writes it, so
    that an error can name it. Raises ModelError for a file that is not JSON.
    """
    for name, key in _PLACES:
        quantization = (read_json(path / name) or {}).get(key)
        if isinstance(quantization, dict) and (scheme := _scheme_of(quantization)) is not None:
            return scheme
    return None


def _scheme_of(quantization: Mapping[str, Any]) -> str | None:
    scheme = quantization.get("kv_cache_scheme")
    if scheme is not None:
        return FP8_SCHEME if _is_fp8(scheme) else json.dumps(scheme)
    algorithm = quantization.get("kv_cache_quant_algo")
    if algorithm is not None:
        return FP8_SCHEME if algorithm == "FP8" else json.dumps(algorithm)
    return None


def _is_fp8(scheme: object) -> bool:
    if not isinstance(scheme, dict) or not {"num_bits", "type"} <= scheme.keys():
        return False
    return all(scheme.get(field) in (None, value) for field, value in _FP8_FIELDS.items())
