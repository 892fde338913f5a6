"""What Ollama tells of the models that it has, here of the served one."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

from services.gateway.apis.ollama.format import timestamp
from services.gateway.apis.ollama.schema import ListedModel, ModelDetails, RunningModel, ShownModel
from services.gateway.core.request_service import RequestService

WEIGHTS = ("*.safetensors", "*.gguf")
NEVER = timedelta(days=36500)  # until a model is taken out of memory
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}  # Ollama's names, and bytes of a value


def listed_model(service: RequestService, name: str, start: datetime) -> ListedModel:
    """The model under one of its names. `start`: of the gateway."""
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(start),
        "size": num_weight_bytes(service.names.root),
        "digest": service.model.weights_hash,
        "details": _details(service),
    }


def running_model(service: RequestService, name: str, start: datetime) -> RunningModel:
    """The same as it is in memory."""
    listed = listed_model(service, name, start)
    return {
        **listed,  # type: ignore[typeddict-item]
        "expires_at": timestamp(start + NEVER),
        "size_vram": listed["size"] if service.model.has_gpu else 0,
        "context_length": service.model.max_model_len,
    }


def shown_model(service: RequestService, name: str, start: datetime) -> ShownModel:
    """What there is to know of it. Its template is Jinja, and not Go's as Ollama's own."""
    model, formats = service.model, service.tokenizer.chat_formats
    template = service.tokenizer.hf_tokenizer.chat_template or ""
    has = {
        "completion": service.generates,
        "embedding": not service.generates,
        "vision": service.pictures is not None,
        "tools": formats.tools is not None,
        "thinking": formats.reasoning is not None,
    }
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": f"num_ctx {model.max_model_len}",
        "template": template if isinstance(template, str) else template.get("default", ""),
        "details": _details(service),
        "model_info": {
            "general.architecture": model.family,
            "general.parameter_count": _num_parameters(service),
            f"{model.family}.context_length": model.max_model_len,
            f"{model.family}.block_count": model.num_layers,
            f"{model.family}.embedding_length": model.hidden_size,
            f"{model.family}.vocab_size": model.vocab_size,
        },
        "capabilities": [name for name, is_there in has.items() if is_there],
        "modified_at": timestamp(start),
    }


def _details(service: RequestService) -> ModelDetails:
    model, count = service.model, _num_parameters(service)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": model.family,
        "families": [model.family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M",
        "quantization_level": _dtype(service)[0],
    }


def _num_parameters(service: RequestService) -> int:
    """By the size of the files, as if all weights had the type in which the model runs."""
    return num_weight_bytes(service.names.root) // _dtype(service)[1]


def _dtype(service: RequestService) -> tuple[str, int]:
    return DTYPES.get(service.model.dtype, (service.model.dtype.upper(), 2))


@cache
def num_weight_bytes(root: str) -> int:
    """The size of a model's files; 0 if they are not on this machine."""
    path = Path(root)
    files = [path] if path.is_file() else [file for kind in WEIGHTS for file in path.glob(kind)]
    return sum(file.stat().st_size for file in files)
