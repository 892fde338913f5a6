"""Adapters of virtual tokens in the gateway: what a dense worker is sent, and how long prompts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from services.common.config import EMBEDDED_MODEL
from services.common.model_config import load_model_config
from services.pb import gateway_pb2, sequence_pb2
from tests.support.clients.http_clients import async_client
from tests.support.prompt_vectors import make_prompt_tuning
from tests.support.running_gateway import run, running_gateway
from tests.support.workers.fake_dense import FakeDense

HIDDEN_SIZE = load_model_config(EMBEDDED_MODEL).hidden_size
VOCAB_SIZE, MAX_MODEL_LEN = 1024, 64
VECTORS = torch.randn(6, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
COMPLETIONS = "/v1/completions"
TOKENS = [5, 6, 7]


def body(name: str, **options: Any) -> dict[str, Any]:
    return {"model": name, "prompt": TOKENS, "max_tokens": 2} | options


def test_virtual_tokens_in_the_gateway(tmp_path: Path) -> None:
    dense = FakeDense(lambda submit: [70] * submit.spec.max_tokens, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
    paths = [make_prompt_tuning(tmp_path / "few", VECTORS), make_prompt_tuning(tmp_path / "one", VECTORS[:1].half())]
    make_prompt_tuning(tmp_path / "many", VECTORS.repeat(20, 1))

    async def test() -> None:
        async with (
            running_gateway(
                tmp_path, dense, max_loras=1, lora_modules=tuple(f"{path.name}={path}" for path in paths),
                lora_directory=tmp_path,
            ) as gateway,
            async_client(gateway.http_address) as client,
        ):  # fmt: skip
            # Both answers to a prompt, and the next prompt with the same table, need it once.
            virtual = list(range(VOCAB_SIZE, VOCAB_SIZE + 6))
            answer = (await client.post(COMPLETIONS, json=body("few", n=2, return_token_ids=True))).json()
            assert answer["usage"]["prompt_tokens"] == 6 + len(TOKENS)
            assert answer["choices"][0]["prompt_token_ids"] == [*virtual, *TOKENS]
            await client.post(COMPLETIONS, json=body("few", prompt="abc"))
            assert all(list(submit.spec.prompt_token_ids[:6]) == virtual for submit in dense.submits)
            check_table(dense, VECTORS, "float32")
            await client.post(COMPLETIONS, json=body("one"))
            check_table(dense, VECTORS[:1].half(), "float16")
            assert list(dense.submits[-1].spec.prompt_token_ids) == [VOCAB_SIZE, *TOKENS]
            assert len(dense.table_parts) == 2 and not any(submit.spec.HasField("adapter") for submit in dense.submits)
            await client.post(COMPLETIONS, json=body(""))
            assert not dense.submits[-1].spec.HasField("prompt_embeds")
            assert list(dense.submits[-1].spec.prompt_token_ids) == TOKENS

            # They count in the length, and keep their place when the prompt is cut.
            response = await client.post(COMPLETIONS, json=body("few", prompt=[5] * (MAX_MODEL_LEN - 6)))
            assert response.status_code == 400
            assert f"{MAX_MODEL_LEN + 1} were requested: {MAX_MODEL_LEN} of the prompt" in response.text
            cut = body("few", prompt=[5] * MAX_MODEL_LEN, truncate_prompt_tokens=-1)
            assert (await client.post(COMPLETIONS, json=cut)).status_code == 200
            assert list(dense.submits[-1].spec.prompt_token_ids) == [*virtual, *([5] * (MAX_MODEL_LEN - 6 - 2))]
            assert (await client.post(COMPLETIONS, json=body("few", max_tokens=1000))).status_code == 200
            assert dense.submits[-1].spec.max_tokens == MAX_MODEL_LEN - 6 - len(TOKENS)
            response = await client.post(COMPLETIONS, json=body("few", prompt_logprobs=1))
            assert response.status_code == 400 and "its virtual tokens have none" in response.text
            response = await client.post(COMPLETIONS, json=body("few", prompt=[VOCAB_SIZE]))
            assert response.status_code == 400 and "out of vocabulary" in response.text

            # Longer than any prompt: it can be loaded, and each request says why it fails.
            load = gateway_pb2.LoadAdapterRequest(name="many", path="many")
            assert (await gateway.stub.LoadAdapter(load)).adapter.name == "many"
            response = await client.post(COMPLETIONS, json=body("many"))
            assert response.status_code == 400 and "maximum context length is 64 tokens" in response.text

    run(test())


def check_table(dense: FakeDense, vectors: torch.Tensor, dtype: str) -> None:
    table: sequence_pb2.PromptEmbedsRef = dense.submits[-1].spec.prompt_embeds
    assert (table.num_rows, table.hidden_size) == tuple(vectors.shape)
    assert (table.dtype, table.first_token_id) == (dtype, VOCAB_SIZE)
    sent = b"".join(part.values for part in dense.table_parts if part.hash == table.hash)
    assert sent == vectors.numpy().tobytes()
