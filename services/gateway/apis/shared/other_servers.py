"""Fields of other servers' APIs that would change an answer and that this server does not support.

Each field is listed with the values that have no effect; these and null are accepted (see `RequestModel`). Fields that
only affect how an answer is computed are not listed: they are ignored like unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LLAMA_CPP: Mapping[str, tuple[Any, ...]] = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "lora": ([],),
    "mirostat": (0,),
    "n_predict": (-1,),  # here: max_tokens
    "n_probs": (0,),  # here: logprobs
    "repeat_penalty": (1,),  # here: repetition_penalty
    "samplers": ([],),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
}

SGLANG: Mapping[str, tuple[Any, ...]] = {
    "custom_logit_processor": ("",),
    "lora_path": ("", []),
    "no_stop_trim": (False,),  # here: include_stop_str_in_output
    "return_hidden_states": (False,),
    "session_params": ({},),
    "stop_regex": ("", []),
}

TGI: Mapping[str, tuple[Any, ...]] = {
    "adapter_id": ("",),
    "guideline": ("",),
    "truncate": (),
    "watermark": (False,),
}

VLLM: Mapping[str, tuple[Any, ...]] = {
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True, False),  # decoders of language models put no spaces there
}
