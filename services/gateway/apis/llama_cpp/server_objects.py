"""What llama.cpp tells of its server: /props and /slots.

Its slots are the places for sequences that may run at once. A sequence here has no place of its own, so each one that
runs stands for a slot, in the order in which they came.
"""

from __future__ import annotations

from services.gateway import __version__
from services.gateway.apis.llama_cpp.format import generation_settings
from services.gateway.apis.llama_cpp.schema import LlamaCppBody, Props, Slot
from services.gateway.apis.shared.prompts import MEDIA_MARKER
from services.gateway.core.request_service import RequestService
from services.gateway.link.journal_entry import JournalEntry

NO_TASK = -1


def server_props(service: RequestService) -> Props:
    """The properties of the server. Raises `PeerError` until a dense worker has answered once."""
    model, hf = service.model, service.tokenizer.hf_tokenizer
    templates = hf.chat_template if isinstance(hf.chat_template, dict) else {"default": hf.chat_template or ""}
    props: Props = {
        "default_generation_settings": {
            "n_ctx": model.max_model_len,
            "params": generation_settings(LlamaCppBody(prompt="")),
        },
        "total_slots": model.max_num_seqs,
        "model_alias": service.names.first,
        "model_path": service.names.root,
        "media_marker": MEDIA_MARKER,
        "modalities": {"vision": service.pictures is not None, "audio": False},
        "chat_template": templates.get("default", ""),
        "bos_token": hf.bos_token or "",
        "eos_token": hf.eos_token or "",
        "build_info": f"twostroke-{__version__}",
        "is_sleeping": False,
    }
    if "tool_use" in templates:
        props["chat_template_tool_use"] = templates["tool_use"]
    return props


def server_slots(service: RequestService, caller: str) -> list[Slot]:
    """The slots, those of running sequences first; only the caller's own have details."""
    running = [each for each in service.journal.unfinished() if each.queue_s is not None and not each.is_follower]
    slots: list[Slot] = []
    for index in range(max(service.model.max_num_seqs, len(running))):
        entry = running[index] if index < len(running) else None
        slot: Slot = {
            "id": index,
            "id_task": NO_TASK if entry is None else entry.seq_id & (2**31 - 1),
            "n_ctx": service.model.max_model_len,
            "speculative": False,
            "is_processing": entry is not None,
        }
        if entry is not None and entry.request.caller == caller:
            slot |= _details(entry)
        slots.append(slot)
    return slots


def _details(entry: JournalEntry) -> Slot:
    request, used, num_tokens = entry.request, entry.spec.sampling, len(entry.output_token_ids)
    return {
        "params": {
            "n_predict": request.max_tokens,
            "max_tokens": request.max_tokens,
            "seed": used.seed,
            "temperature": used.temperature,
            "top_k": used.top_k or 0,
            "top_p": used.top_p,
            "min_p": used.min_p,
            "repeat_penalty": used.repetition_penalty,
            "presence_penalty": used.presence_penalty,
            "frequency_penalty": used.frequency_penalty,
            "n_probs": request.num_logprobs or 0,
        },
        "n_prompt_tokens": len(request.spec.prompt_token_ids),
        "next_token": {
            "has_next_token": True,
            "n_remain": request.max_tokens - num_tokens,
            "n_decoded": num_tokens,
        },
    }
