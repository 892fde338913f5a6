"""Each family answers through gateway, dense worker and attention worker, one tiny model each, as transformers does."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModel, DonutImageProcessorPil

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.support.cluster import REQUEST_TIMEOUT_S, Stubs, request, running_cluster
from tests.support.dense.encoder_decoder_models import (
    NOUGAT_PROCESSOR,
    load_true_encoder_decoder,
    make_encoder_decoder,
    random_source,
)
from tests.support.dense.family_models import VARIANTS, make_family_model
from tests.support.encoders import SIZES, add_tokenizer, make_encoder
from tests.support.plain_services import PlainServices, plain_services
from tests.support.reference import TOKENIZER_FILES, VOCAB_SIZE, make_served_model, random_prompts, reference_tokens
from tests.support.served_vision import (
    Turn,
    chat_message,
    expected_tokens,
    make_served_vision_model,
    pictures_of,
    png,
    rendered,
)

pytestmark = pytest.mark.timeout(300)  # the first one waits for imports, and the machine may be slow

MAX_TOKENS = 12
TOLERANCE = 2e-5  # of vectors of length 1; both sum in other orders
# What is not here has a file of its own: the families of `test_layer_group_survival.py` and its neighbours, BLIP-2,
# InternVL, Nougat, Qwen2.5-VL, Whisper, BERT. With --all-families all variants of texts are here.
TEXTS = (
    *("gptj", "nemotron", "gpt_bigcode", "baichuan-7b", "baichuan-13b", "chatglm", "internlm", "internlm2", "qwen"),
    *("skywork", "mpt-grouped", "opt-350m", "mamba"),
)
PICTURES = (
    *("llava", "llava_next", "llava_onevision", "llava_pixtral", "mistral3", "gemma3", "qwen3_vl", "qwen3_vl_moe"),
)
FIRST, SECOND = Image.new("RGB", (50, 37), "red"), Image.new("RGB", (64, 64), "white")  # noise looks alike to some


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "text_variant" in metafunc.fixturenames:
        metafunc.parametrize("text_variant", VARIANTS if metafunc.config.getoption("--all-families") else TEXTS)


@contextlib.contextmanager
def served(directory: Path, model: Path, *settings: str) -> Iterator[PlainServices]:
    """The three processes, which have no more to do at the end."""
    directory.mkdir()
    # Prompts take several steps, and several blocks.
    limits = ("scheduler.max_num_batched_tokens=24", "scheduler.max_num_seqs=8", "attention.block_size=8")
    with plain_services(directory, f"model.path={model}", *limits, *settings) as services:
        yield services
        services.wait_idle()


def tokens_of(services: Stubs, message: gateway_pb2.GenerateRequest) -> list[int]:
    [completion] = services.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S).completions
    return list(completion.token_ids)


def test_texts(text_variant: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    length = "max_seq_len" if text_variant.startswith("mpt") else "max_position_embeddings"
    make_family_model(path, text_variant, **{"vocab_size": VOCAB_SIZE, length: 256})
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODEL / name, path)
    prompt = random_prompts(2, longest=40, seed=2)[1]
    with served(tmp_path / "services", path) as services:
        found = services.generate(prompt, MAX_TOKENS, ignore_eos=True).token_ids
    assert found == reference_tokens(path, prompt, MAX_TOKENS)


@pytest.mark.parametrize("variant", PICTURES)
def test_pictures(variant: str, tmp_path: Path) -> None:
    path = make_served_vision_model(tmp_path / "model", variant)

    def expected(picture: Image.Image) -> list[int]:
        turns: list[Turn] = [("user", ["All ", picture])]
        return expected_tokens(path, rendered(turns), pictures_of(turns), MAX_TOKENS, variant)

    assert expected(FIRST) != expected(SECOND), "the picture matters"
    with served(tmp_path / "services", path) as services:
        assert tokens_of(services, chat_message([("user", ["All ", FIRST])], MAX_TOKENS)) == expected(FIRST)


@pytest.mark.parametrize("variant", ["t5", "mt5", "bart", "mbart", "marian", "fsmt"])
def test_encoders_with_decoders(variant: str, tmp_path: Path) -> None:
    path = make_encoder_decoder(tmp_path / "model", variant, seed=3)
    truth = load_true_encoder_decoder(path)
    source = random_source(truth, 40, seed=1)
    with served(tmp_path / "services", path) as services:
        found = tokens_of(services, request(source.tolist(), MAX_TOKENS, ignore_eos=True))
    assert [found] == true_outputs(truth, source)


def test_donut(tmp_path: Path) -> None:
    path = make_encoder_decoder(tmp_path / "model", "donut-tied", seed=5)
    processor = NOUGAT_PROCESSOR | {"image_processor_type": "DonutImageProcessor"}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    truth, pages = load_true_encoder_decoder(path), DonutImageProcessorPil(**processor)
    expected = [
        true_outputs(truth, pages(images=page, return_tensors="pt")["pixel_values"][0]) for page in (FIRST, SECOND)
    ]
    assert expected[0] != expected[1], "the page matters"
    message = request("", MAX_TOKENS, ignore_eos=True)
    message.pictures.add(data=png(FIRST))
    with served(tmp_path / "services", path) as services:
        assert [tokens_of(services, message)] == expected[0]


@torch.inference_mode()
def true_outputs(truth: torch.nn.Module, source: torch.Tensor) -> list[list[int]]:
    """What transformers generates greedily, without the token that outputs begin with."""
    rows = truth.generate(
        source[None],
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        num_beams=1,
        use_cache=False,
        eos_token_id=None,
        forced_eos_token_id=None,
    )
    return [row[1:] for row in rows.tolist()]


def vector_of(services: Stubs, token_ids: list[int]) -> torch.Tensor:
    inputs = [gateway_pb2.EmbedInput(token_ids=gateway_pb2.TokenIds(ids=token_ids))]
    [found] = services.gateway.Embed(gateway_pb2.EmbedRequest(inputs=inputs), timeout=REQUEST_TIMEOUT_S).vectors
    return torch.tensor(found.values)


@pytest.mark.parametrize("family", ["roberta", "modernbert"])
@torch.inference_mode()
def test_vectors_of_encoders(family: str, tmp_path: Path) -> None:
    """They need no attention worker, and the launcher starts none. Without other files the first token is pooled."""
    path, token_ids = tmp_path / "model", list(range(5, 45))
    truth = make_encoder(path, family, SIZES | {"num_hidden_layers": 4})
    add_tokenizer(path)
    expected = truth(torch.tensor([token_ids])).last_hidden_state[0, 0]
    directory = tmp_path / "cluster"
    directory.mkdir()
    with running_cluster(directory, f"model.path={path}", is_warm=True) as cluster:
        found = vector_of(cluster, token_ids)
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected, dim=0), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@torch.inference_mode()
def test_vectors_of_decoders(family: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding, with a language head and sentence-transformers' files; as e5-mistral, with neither."""
    path = make_served_model(tmp_path / "model", family, tie_word_embeddings=True)
    truth = AutoModel.from_pretrained(path).eval()
    if family == "mistral":
        truth.save_pretrained(path)
    else:
        kinds = ("Transformer", "Pooling", "Normalize")
        places = ("", "1_Pooling", "2_Normalize")
        modules = [
            {"path": place, "type": f"sentence_transformers.models.{kind}"}
            for place, kind in zip(places, kinds, strict=True)
        ]
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    token_ids = random_prompts(2, longest=40, seed=2)[1]
    expected = truth(torch.tensor([token_ids])).last_hidden_state[0, -1]
    with served(tmp_path / "services", path) as services:
        found = vector_of(services, token_ids)
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected, dim=0), rtol=0, atol=TOLERANCE)
