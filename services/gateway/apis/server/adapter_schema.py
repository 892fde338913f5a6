"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

from pydantic import Field

from services.gateway.apis.shared.request_model import RequestModel


class LoadAdapterBody(RequestModel):
    """The adapter to load."""

    lora_name: str = Field("", description="Its name, which requests give as their model")
    lora_path: str = Field("", description="Its directory, absolute or relative to gateway.lora_directory")
    load_inplace: bool | None = Field(None, description="Replace an adapter of this name; default: false")


class UnloadAdapterBody(RequestModel):
    """The adapter to unload."""

    lora_name: str = Field("", description="Its name")
