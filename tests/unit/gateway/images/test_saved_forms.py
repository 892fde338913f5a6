"""Directories of models that see pictures in the forms that transformers saves, behind a whole gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2
import pytest
from structlog.testing import capture_logs
from transformers import AutoTokenizer, LlavaProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from services.common.config import EMBEDDED_MODEL
from services.common.errors import ModelError
from services.common.json_files.processor_files import read_processor_template
from services.gateway.text.chat_message import Message
from services.gateway.text.chat_template import Chat
from services.gateway.text.tokenizer import load_tokenizer
from tests.support.clients.gateway_calls import ids
from tests.support.clients.http_gateway import CHATS, check_error, with_client
from tests.support.dense.vision_models import VARIANTS, make_vision_model, noise
from tests.support.running_gateway import RunningGateway
from tests.support.served_vision import data_url, make_served_vision_model
from tests.support.workers.fake_dense import FakeDense

PICTURE = {"type": "image_url", "image_url": {"url": data_url(noise(30, 43, 1))}}
TEXT = {"type": "text", "text": "What is it?"}
FILES = ("preprocessor_config.json", "processor_config.json")
TEMPLATE = (  # of the form of LLaVA 1.5: a content that is a text has no parts, and is left out
    "{% for message in messages %}{{ message.role.upper() }}: "
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}<image>\\n{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
OTHER_TEMPLATE = "{% for message in messages %}{{ message.role }}{% endfor %}"


def save_model(path: Path, form: str, template: str = TEMPLATE) -> None:
    """A LLaVA as transformers saves it, with the processor's template in a file of this name."""
    make_vision_model(path, "llava", text={"vocab_size": 400})
    (path / "preprocessor_config.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = OTHER_TEMPLATE
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"image_token_index": tokenizer.encode("<image>")[-1]}))
    LlavaProcessor(
        LlavaImageProcessorPil(**VARIANTS["llava"].processor),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(path)
    if form == "chat_template.jinja":
        return
    (path / "chat_template.jinja").unlink()
    for name, given in (("tokenizer_config.json", OTHER_TEMPLATE), (form, template)):
        file = path / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(fields | {"chat_template": given}))


@pytest.mark.parametrize(
    ("form", "start"),
    [("chat_template.jinja", ""), ("chat_template.json", ""), ("processor_config.json", "{{ bos_token }}")],
)
def test_chats_are_those_of_the_processor(form: str, start: str, tmp_path: Path) -> None:
    """It adds the token that begins a text where the template does not write it."""
    path = tmp_path / "model"
    save_model(path, form, start + TEMPLATE)
    truth = LlavaProcessor.from_pretrained(path)
    picture = noise(30, 43, 1)

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        for content, of_truth in (
            ([TEXT, PICTURE, TEXT], [TEXT, {"type": "image", "image": picture}, TEXT]),
            (TEXT["text"], [TEXT]),
        ):
            chat = [{"role": "user", "content": of_truth}]
            options = {"add_generation_prompt": True, "return_dict": True}
            expected = truth.apply_chat_template(chat, tokenize=True, **options)["input_ids"]
            answer = await client.post("/tokenize", json={"messages": [{"role": "user", "content": content}]})
            assert answer.json()["tokens"] == expected[0] and expected[0].count(1) == 1, answer.text
        answer = await client.post("/apply-template", json={"messages": [{"role": "user", "content": TEXT["text"]}]})
        assert answer.json()["prompt"] == truth.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert (await client.get("/props")).json()["chat_template"] == start + TEMPLATE

    with_client(tmp_path, FakeDense(lambda submit: ids(" a")), test, model=path)


def test_pictures_in_prompts_of_llama_cpp_stand_where_their_markers_do(tmp_path: Path) -> None:
    """The tokens are those that the processor makes of a text with its own markers."""
    save_model(path := tmp_path / "model", "chat_template.jinja")
    truth, pictures = LlavaProcessor.from_pretrained(path), [noise(30, 43, 1), noise(20, 20, 2)]
    files = [data_url(each).partition(",")[2] for each in pictures]

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        marker = (await client.get("/props")).json()["media_marker"]
        one = {"prompt_string": f"What is {marker}?", "multimodal_data": files[:1]}
        two = {"prompt_string": f"{marker}A{marker}", "multimodal_data": files}
        answer = await client.post("/completion", json={"prompt": [one, two, "plain"], "n_predict": 1})
        assert answer.status_code == 200, answer.text
        texts = ("What is <image>?", pictures[:1]), ("<image>A<image>", pictures), ("plain", None)
        for submit, (text, shown) in zip(dense.submits, texts, strict=True):
            assert list(submit.spec.prompt_token_ids) == truth(images=shown, text=text)["input_ids"][0]
        alone = await client.post("/completion", json={"prompt": one, "n_predict": 1})
        first, *_, last = dense.submits
        assert alone.status_code == 200 and last.spec.prompt_token_ids == first.spec.prompt_token_ids
        for data, what in (("malformed", "base64"), ("", "no bytes"), ("AAAA", "picture")):
            wrong = await client.post("/completion", json={"prompt": {**one, "multimodal_data": [data]}})
            assert wrong.status_code == 400 and what in wrong.json()["error"]["message"], wrong.text

    dense = FakeDense(lambda submit: ids(" a"))
    with_client(tmp_path, dense, test, model=path)


def test_the_template_of_the_configuration_comes_first(tmp_path: Path) -> None:
    save_model(tmp_path, "chat_template.json")
    file = tmp_path / "own.jinja"
    file.write_text("own")
    assert load_tokenizer(tmp_path, chat_template=file).hf_tokenizer.chat_template == "own"


def test_the_tokenizer_of_a_model_of_text_keeps_its_template(tmp_path: Path) -> None:
    save_model(tmp_path, "chat_template.json")
    config = tmp_path / "tokenizer_config.json"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(tmp_path).hf_tokenizer.chat_template == OTHER_TEMPLATE
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": None}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.hf_tokenizer.chat_template == TEMPLATE
    assert asyncio.run(tokenizer.render_chat(Chat([Message("user", "Hi")]))) == "USER: Hi ASSISTANT:"


@pytest.mark.parametrize("template", [["a"], {"rag": "a"}, 1])
def test_a_template_that_is_none_is_refused(template: object, tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ModelError, match=r"chat_template\.json has a chat_template that is neither"):
        read_processor_template(tmp_path)


def test_what_a_directory_lacks_is_logged_and_named_in_the_refusal(tmp_path: Path) -> None:
    path = make_served_vision_model(tmp_path / "model", "llava")
    (path / "preprocessor_config.json").unlink()

    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = await client.post(CHATS, json={"messages": [{"role": "user", "content": [TEXT, PICTURE]}]})
        check_error(answer, 400, "messages", "sees no pictures", *FILES)
        text = await client.post(CHATS, json={"messages": [{"role": "user", "content": [TEXT]}], "max_tokens": 1})
        assert text.status_code == 200, text.text

    with capture_logs() as logs:
        with_client(tmp_path, FakeDense(lambda submit: ids(" a")), test, model=path)
    [reason] = [each["reason"] for each in logs if each["event"] == "the text part of the model is served alone"]
    assert all([name in reason for name in FILES])
