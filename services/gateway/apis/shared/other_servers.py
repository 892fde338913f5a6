"""Fields of other servers' APIs that would change an answer and that this server does not support.

Each field is listed with the values that have no effect; these and null are accepted (see `RequestModel`). Fields that
only affect how an answer is computed are not listed: they are ignored like unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.apis.shared.feature_fields import NO_FEATURES

LLAMA_CPP: Mapping[str, tuple[Any, ...]] = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "lora": ([],),
    "mirostat": (0,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
}

# Only llama.cpp's own routes have these.
LLAMA_CPP_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "n_probs": (0,),  # elsewhere: logprobs
    "repeat_penalty": (1,),  # elsewhere: repetition_penalty
    "samplers": ([],),
}

SGLANG: Mapping[str, tuple[Any, ...]] = {
    "beam_width": (0, 1),  # here: use_beam_search
    "custom_logit_processor": ("",),
    "input_ids": (),  # of a chat, in place of its messages
    "lora_path": ("", []),
    "return_cached_tokens_details": (False,),
    "return_meta_info": (False,),
    "return_routed_experts": (False,),
    "session_params": ({},),
}

TGI: Mapping[str, tuple[Any, ...]] = {
    "adapter_id": ("",),
    "guideline": ("",),
    "truncate": (),
    "watermark": (False,),
}

VLLM: Mapping[str, tuple[Any, ...]] = {
    "logits_processors": ([],),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True, False),  # decoders of language models put no spaces there
    "watermarking": (False,),
}

# What vLLM adds to OpenAI's Responses and to Anthropic's Messages.
VLLM_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "ec_transfer_params": (),
    "kv_transfer_params": (),
}
VLLM_RESPONSES: Mapping[str, tuple[Any, ...]] = {
    **VLLM_MESSAGES,
    "include_stop_str_in_output": (False,),
    "mm_processor_kwargs": ({},),
    "previous_input_messages": ([],),
    "previous_response": (),
    "skip_special_tokens": (True,),
    "vllm_xargs": ({},),
}

# What no route here supports, and what only some do.
OF_OTHER_SERVERS: Mapping[str, tuple[Any, ...]] = {**LLAMA_CPP, **SGLANG, **TGI, **VLLM}
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {**OF_OTHER_SERVERS, **NO_FEATURES}

# Fields of chats, where prompts are continued.
OF_CHATS: Mapping[str, tuple[Any, ...]] = {
    "ec_transfer_params": (),
    "functions": ([],),
    "kv_transfer_params": (),
    "max_completion_tokens": (),
    "max_reasoning_tokens": (),
    "messages": (),
    "thinking_token_budget": (-1,),
    "tools": ([],),
    "top_logprobs": (),
    "vllm_xargs": ({},),
}
