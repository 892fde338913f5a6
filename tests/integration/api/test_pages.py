"""Nougat in a cluster, compared with transformers: pages over OpenAI's client and gRPC, beams, hostile ones, kills."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from subprocess import CompletedProcess

import openai
import pytest
import torch
from PIL import Image
from transformers import NougatImageProcessorPil, PreTrainedModel

from services.pb import gateway_pb2, sampling_pb2
from tests.support.clients.openai_client import openai_client
from tests.support.clients.streams import collect_all
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, ctl, running_cluster
from tests.support.dense.encoder_decoder_models import (
    NOUGAT_PROCESSOR,
    load_true_encoder_decoder,
    make_encoder_decoder,
)
from tests.support.dense.vision_models import noise
from tests.support.served_vision import data_url, png

pytestmark = pytest.mark.timeout(300)  # processes start several times, and the machine may be slow

PAGES = [noise(80, 60, 1), noise(30, 90, 2), noise(58, 40, 3), noise(140, 50, 4)]
NUM_ROWS = 12  # of the encoder's output
NUM_LONG_TOKENS = 50  # so many that a kill comes in the middle
TEXT, TEXT_IDS = "w7 w9", [7, 9]


@dataclass
class Server:
    cluster: Cluster
    model: Path

    @cached_property
    def truth(self) -> PreTrainedModel:
        return load_true_encoder_decoder(self.model)

    @torch.inference_mode()
    def expected(self, page: Image.Image, max_tokens: int, begun: list[int] | None = None, **options: object) -> list:
        """What transformers generates: greedily, or all beams."""
        pixels = NougatImageProcessorPil(**NOUGAT_PROCESSOR)(images=page, return_tensors="pt")["pixel_values"]
        start = [self.truth.generation_config.decoder_start_token_id] if begun is None else begun
        rows = self.truth.generate(
            pixels,
            decoder_input_ids=torch.tensor([start]),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=False,
            forced_eos_token_id=None,
            **{"num_beams": 1, "eos_token_id": None} | options,
        )
        return [row[len(start) :] for row in rows.tolist()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("pages")
    model = make_encoder_decoder(directory / "model", "nougat", seed=5)
    (model / "preprocessor_config.json").write_text(json.dumps(NOUGAT_PROCESSOR))
    settings = (f"model.path={model}", "scheduler.max_num_batched_tokens=50", "scheduler.max_num_seqs=12")
    with running_cluster(directory, *settings, "scheduler.max_beam_width=3", is_warm=True) as cluster:
        yield Server(cluster, model)
        cluster.wait_idle()


def page_part(page: Image.Image) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(page)}}


def user(*parts: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def page_message(page: Image.Image, max_tokens: int, text: str = "") -> gateway_pb2.GenerateRequest:
    """A page over gRPC, greedily."""
    message = gateway_pb2.GenerateRequest(prompt=text, max_tokens=max_tokens, ignore_eos=True)
    message.sampling.temperature = 0.0
    message.pictures.add(data=png(page))
    return message


def test_openai_with_a_page_alone_and_with_what_the_decoder_begins_with(server: Server) -> None:
    asked = {"model": "model", "max_tokens": 12, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    text = {"type": "text", "text": TEXT}
    with openai_client(server.cluster) as client:
        answer = client.chat.completions.create(messages=user(page_part(PAGES[0])), **asked)
        assert [answer.choices[0].token_ids] == server.expected(PAGES[0], 12)
        assert answer.usage is not None and answer.usage.prompt_tokens == NUM_ROWS + 1
        answer = client.chat.completions.create(messages=user(page_part(PAGES[1]), text), **asked)
        assert [answer.choices[0].token_ids] == server.expected(PAGES[1], 12, TEXT_IDS)
        refused = {
            "has 0 pictures, the model reads one": user(text),
            "has 2 pictures, the model reads one": user(page_part(PAGES[0]), page_part(PAGES[1])),
            "one message of the user": [*user(page_part(PAGES[0])), {"role": "assistant", "content": "w7"}],
        }
        for reason, messages in refused.items():
            with pytest.raises(openai.BadRequestError, match=reason):
                client.chat.completions.create(messages=messages, **asked)
        with pytest.raises(openai.BadRequestError, match="has 0 pictures"):
            client.completions.create(model="model", prompt=TEXT)


def test_beams_and_several_answers(server: Server) -> None:
    message = page_message(PAGES[2], 10)
    message.ClearField("sampling")
    message.ClearField("ignore_eos")
    message.n = message.best_of = 3
    message.beam_search.CopyFrom(sampling_pb2.BeamSearch())
    end = server.truth.config.decoder.eos_token_id
    rows = server.expected(PAGES[2], 10, num_beams=3, num_return_sequences=3, eos_token_id=end)
    found = server.cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S).completions
    assert [list(each.token_ids) for each in found] == [
        row[: row.index(end) + 1] if end in row else row for row in rows
    ]
    message = page_message(PAGES[2], 10, TEXT)
    message.n = 2
    found = server.cluster.gateway.Generate(message, timeout=REQUEST_TIMEOUT_S).completions
    assert [list(each.token_ids) for each in found] == 2 * server.expected(PAGES[2], 10, TEXT_IDS)


def test_streams_survive_kills_beside_hostile_pages(server: Server) -> None:
    expected = [server.expected(page, NUM_LONG_TOKENS)[0] for page in PAGES]
    assert len({tuple(each) for each in expected}) == len(PAGES), "the page matters"
    messages = [page_message(page, NUM_LONG_TOKENS) for page in (*PAGES, PAGES[0])]

    def disturb(*roles: str) -> None:
        server.cluster.kill(*roles)
        with openai_client(server.cluster) as client:
            for url in (data_url(Image.new("RGB", (1, 300))), data_url(PAGES[0])[:200], "http://127.0.0.1:1/a.png"):
                head = {"type": "image_url", "image_url": {"url": url}}
                with pytest.raises(openai.BadRequestError):
                    client.chat.completions.create(model="model", messages=user(head), max_tokens=1)

    for roles in (("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker")):
        found = collect_all(server.cluster.gateway, messages, lambda roles=roles: disturb(*roles))
        assert [each.token_ids[0] for each in found] == [*expected, expected[0]]
        server.cluster.wait_idle()


def test_the_dense_worker_is_replaced_under_streams(server: Server) -> None:
    replaced = list[CompletedProcess[str]]()
    messages = [page_message(page, NUM_LONG_TOKENS) for page in PAGES]
    found = collect_all(server.cluster.gateway, messages, lambda: replaced.append(ctl(server.cluster, "replace-dense")))
    assert replaced[0].returncode == 0, replaced[0].stderr
    assert [each.token_ids[0] for each in found] == [server.expected(page, NUM_LONG_TOKENS)[0] for page in PAGES]
    server.cluster.wait_idle()
