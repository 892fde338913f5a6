"""The first rank's backend is a whole `DenseBackend`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from services.dense_worker.backends import DenseBackend
from services.dense_worker.ranks.leading_backend import LeadingBackend


def test_it_has_all_that_a_backend_has() -> None:
    own: Any = SimpleNamespace(takes_input_embeds=True, gives_hidden_states=True, logits_dtype=torch.bfloat16)
    operations: Any = SimpleNamespace(use_group=lambda group: None, share_tokens=lambda token_ids: None)
    backend: Any = LeadingBackend(own, operations)
    methods = [name for name, value in vars(DenseBackend).items() if callable(value) and not name.startswith("_")]
    values = {name: getattr(backend, name) for name in DenseBackend.__annotations__}
    assert {"first", "last"} < {*methods} and all(callable(getattr(backend, name)) for name in methods)
    assert values == {
        "takes_input_embeds": False,
        "gives_hidden_states": True,
        "logits_dtype": torch.bfloat16,
        "always_ends": False,
    }
