"""`parse_hf_config`: a config.json as transformers understands it. Imports transformers only when it is called.

The import takes one to three seconds, so workers avoid it: see `services/common/ready_shape.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def parse_hf_config(raw: dict[str, Any], *, standardizes_rope: bool = False) -> PretrainedConfig:
    """What transformers' class of the model's type makes of a JSON object.

    `standardizes_rope`: as Hugging Face's models do; it reads an original length beside rope_parameters.

    Raises `ValueError`, or what else the class raises (TypeError, LookupError, AttributeError), for unusable values.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        hf = AutoConfig.for_model(**raw)
        if standardizes_rope:
            hf.standardize_rope_params()
        return hf
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error


def is_hf_type(model_type: str) -> bool:
    """Whether transformers has a class for a `model_type`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES
