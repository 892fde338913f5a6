"""`ConfigFields`: a config.json as transformers understands it, which remembers the fields that a family has read.

What a family has not read must not change what transformers computes: `check_all_understood` refuses such a field.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.json_files.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig

MAX_LAYERS = 4096

# Fields that some class of transformers declares and that do not change the logits of a loaded model: special tokens,
# training, memory, other tasks, and how (not what) transformers computes. So are those that all its classes have.
_WITHOUT_EFFECT = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("initializer_range", "init_std", "init_device", "use_cache", "cache_implementation", "pretraining_tp"),
        *("slow_but_exact", "reorder_and_upcast_attn", "is_decoder", "torch_dtype", "model_type"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "max_window_layers"),
        *("layerdrop", "dropout", "norm_type", "verbose", "image_token_index"),
    }
)
_ENDINGS_WITHOUT_EFFECT = ("_dropout", "_pdrop")
_PREFIXES_WITHOUT_EFFECT = ("summary_", "_")

# Fields by which some family computes something else, with the values by which it does not. Classes of transformers
# that do not declare such a field ignore it; a config.json that sets it describes another model than they compute.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (0,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "kv_lora_rank": (),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "n_routed_experts": (0, 1),
}


class ConfigFields(Fields):
    """The fields of one config.json. `path` is the model's directory, for messages and generation_config.json."""

    def __init__(self, family: str, raw: Mapping[str, Any], hf: PretrainedConfig, path: Path) -> None:
        """`raw` is the JSON object, `hf` what transformers made of it, from which values are read."""
        super().__init__(raw, str(path))
        self.family, self.path = family, path
        self._hf = hf
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """The value of a field that the family's class declares."""
        self._read |= {name, self._hf.attribute_map.get(name, name)}
        return getattr(self._hf, name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; `default` if the class has no such field, or if it is null."""
        self._read |= {name, self._hf.attribute_map.get(name, name)}
        value = getattr(self._hf, name, None)
        return default if value is None else value

    def flag(self, name: str) -> bool:
        """A field that is true or false. A class without it, and null, mean false."""
        return bool(self.get(name, False))

    def only(self, name: str, *supported: Any) -> None:
        """Refuses a value other than these of a field that would change the computation."""
        value = self.get(name)
        if value is not None and value not in supported:
            raise self.unsupported(name, value, ", ".join(map(str, supported)) or "none")

    def ignore(self, *names: str) -> None:
        """Says of fields that transformers' class of this family does not use them."""
        self._read |= set(names)

    def check_all_understood(self) -> None:
        """Refuses every field that was not read and may change the computation.

        Such a field is declared by transformers' class and differs from the class's default, or it is known to change
        the computation of another family.
        """
        declared = {field.name for field in dataclasses.fields(type(self._hf))}
        default: PretrainedConfig | None = None
        for name, value in self.raw.items():
            if name in self._read or _has_no_effect(name):
                continue
            if name in declared:
                default = default or type(self._hf)()
                is_other = getattr(self._hf, name, None) != getattr(default, name, None)
            else:
                is_other = name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]
            if is_other:
                raise self.error(name, value, f"which changes the computation and is not supported for {self.family!r}")


def _has_no_effect(name: str) -> bool:
    return (
        name in _WITHOUT_EFFECT
        or name in _fields_of_all()
        or name.endswith(_ENDINGS_WITHOUT_EFFECT)
        or name.startswith(_PREFIXES_WITHOUT_EFFECT)
    )


@functools.cache
def _fields_of_all() -> frozenset[str]:
    """What every class of transformers declares. Its import takes a second, and a worker may read no config."""
    from transformers import PretrainedConfig

    return frozenset(field.name for field in dataclasses.fields(PretrainedConfig))
