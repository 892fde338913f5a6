"""Model directories with a chat template for tools or reasoning, and a dense worker that writes a given answer.

The tokenizer has one token for each byte, so that a streamed answer arrives cut at every place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.common.config import EMBEDDED_MODEL
from services.gateway.text.harmony import MARKERS
from services.pb import dense_pb2
from tests.support.clients.http_clients import async_client
from tests.support.running_gateway import RunningGateway, run, running_gateway, until
from tests.support.workers.fake_dense import FakeDense

TEMPLATES = Path(__file__).with_name("templates")
EOS = "<|im_end|>"
# The tokens of each format, special or not as in the models that use it.
OF_MISTRAL, OF_LLAMA = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]"), ("<|python_tag|>", "<|python_start|>")
SPECIAL = ("<|im_start|>", EOS, *OF_MISTRAL, *OF_LLAMA, *MARKERS)
PLAIN = ("</tool_call>", "<think>", "</think>")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
Test = Callable[[openai.AsyncOpenAI, RunningGateway], Awaitable[None]]


def byte_tokenizer(special: tuple[str, ...] = ("<tool_call>", *SPECIAL)) -> PreTrainedTokenizerFast:
    """One token for each byte and for each marker. `<tool_call>` is special: skipping it would hide the calls."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    backend.add_tokens([AddedToken(name, normalized=False) for name in PLAIN])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


TOKENIZER = byte_tokenizer()


def make_chat_model(path: Path, template: str) -> Path:
    """A model directory with the tokenizer above and the template `template` of `templates/`; without weights."""
    path.mkdir()
    TOKENIZER.save_pretrained(path)
    (path / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
    eos = TOKENIZER.convert_tokens_to_ids(EOS)
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text()) | {"eos_token_id": eos}
    (path / "config.json").write_text(json.dumps(config))
    shutil.copy(EMBEDDED_MODEL / "generation_config.json", path)
    generation = json.loads((path / "generation_config.json").read_text()) | {"eos_token_id": eos}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def answer_tokens(text: str) -> list[int]:
    """The tokens of an answer, EOS included."""
    return TOKENIZER.encode(text + EOS, add_special_tokens=False)


def writes(*answers: str) -> Callable[[dense_pb2.Submit], list[int]]:
    """A script: each request gets the next answer, the last one again and again."""
    left = list(answers)

    def script(submit: dense_pb2.Submit) -> list[int]:
        return answer_tokens(left.pop(0) if len(left) > 1 else left[0])

    return script


def with_chat_model(
    tmp_path: Path, template: str, answers: list[str] | FakeDense, test: Test, **options: Any
) -> FakeDense:
    """Runs `test` with the official client of OpenAI against a model that gives `answers`; returns its worker."""
    if isinstance(answers, FakeDense):
        dense = answers
    else:
        dense = FakeDense(writes(*answers), max_model_len=options.pop("max_model_len", 4096))

    async def body() -> None:
        model = make_chat_model(tmp_path / "model", template)
        async with (
            running_gateway(tmp_path, dense, model=model, **options) as gateway,
            async_client(gateway.http_address) as transport,
        ):
            api = openai.AsyncOpenAI(
                api_key="none needed", base_url="http://gateway/v1", http_client=transport, max_retries=0
            )
            await test(api, gateway)
            await until(lambda: not dense.running)  # it may read a cancellation after the client has its answer

    run(body())
    return dense


def prompt_text(submit: dense_pb2.Submit) -> str:
    """The prompt that a template made."""
    return TOKENIZER.decode(list(submit.spec.prompt_token_ids), skip_special_tokens=False)
