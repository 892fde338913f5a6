"""A dense worker that dies in every step that computes the tokens POISON, as if a kernel crashed."""

from __future__ import annotations

import os
import signal

import torch

from services.dense_worker.__main__ import main
from services.dense_worker.backends import InputEmbeds
from services.dense_worker.backends.torch_backend import TorchBackend

POISON = [1000, 1000, 1000]  # no other prompt and no answer contains them

first = TorchBackend.first


def poisoned_first(
    backend: TorchBackend, token_ids: torch.Tensor, qkv: torch.Tensor, input_embeds: InputEmbeds | None = None
) -> torch.Tensor:
    if str(POISON)[1:-1] in str(token_ids.tolist()):
        os.kill(os.getpid(), signal.SIGKILL)
    return first(backend, token_ids, qkv, input_embeds)


if __name__ == "__main__":
    TorchBackend.first = poisoned_first  # type: ignore[method-assign]
    main()
