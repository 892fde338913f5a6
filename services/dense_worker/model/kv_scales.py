"""Reads the scales of an FP8 KV cache from a checkpoint. They are no weights: the attention worker uses them."""

from __future__ import annotations

import math
import re

from services.common.errors import ModelError
from services.common.kv_cache.scales import KVScales
from services.dense_worker.model.checkpoint import Checkpoint

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    # compressed-tensors writes the first form, in earlier versions the third; ModelOpt writes the second.
    r"(?:(?:attn\.)?(?P<a>[kv])_scale|(?P<b>[kv])_proj\.(?P=b)_scale|(?P<c>[kv])_proj\.output_scale)"
)
_DTYPES = ("F32", "F16", "BF16")
_SHAPES = ((), (1,), (1, 1))


def read_kv_scales(checkpoint: Checkpoint, num_layers: int) -> KVScales | None:
    """The scales in a checkpoint, of the first `num_layers` layers; None if there are none.

    Raises ModelError, which names tensor and value, if one is missing beside others, there twice, no single number, not
    finite, or not above 0.
    """
    names: dict[tuple[str, int], str] = {}  # by k or v, and layer
    for name in checkpoint.names:
        match = _NAME.fullmatch(name)
        if match is None or int(match["layer"]) >= num_layers:
            continue
        key = (match["a"] or match["b"] or match["c"], int(match["layer"]))
        if key in names:
            raise ModelError(f"{checkpoint.file_of(name)} holds {name}, and there is {names[key]} for the same scale")
        names[key] = name
    if not names:
        return None
    missing = [(kind, layer) for kind in "kv" for layer in range(num_layers) if (kind, layer) not in names]
    if missing:
        kind, layer = missing[0]
        name = next(iter(names.values()))
        folder = checkpoint.file_of(name).parent
        raise ModelError(f"{folder} lacks the {kind}_scale of layer {layer}'s KV cache, though it has {name}")
    keys, values = (tuple(_read_scale(checkpoint, names[kind, layer]) for layer in range(num_layers)) for kind in "kv")
    return KVScales(keys, values)


def _read_scale(checkpoint: Checkpoint, name: str) -> float:
    scale = checkpoint.read(name, _DTYPES, _SHAPES).float().item()
    if not (math.isfinite(scale) and scale > 0):
        raise ModelError(f"{name} in {checkpoint.file_of(name)} is {scale}, expected a finite number above 0")
    return scale
