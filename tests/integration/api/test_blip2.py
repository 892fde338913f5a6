"""BLIP-2 with OPT and T5 in a cluster: chats with pictures, and kills; transformers gives prompts and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import openai
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Blip2Processor, BlipImageProcessorPil, PreTrainedModel

from services.pb import gateway_pb2
from tests.support.clients.openai_client import openai_client
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, running_cluster
from tests.support.dense.vision_models import VARIANTS, load_true_model, noise
from tests.support.served_vision import data_url, make_served_vision_model, png

pytestmark = pytest.mark.timeout(300)  # processes start several times, and the machine may be slow

IMAGE_TOKEN = "<image>"  # as transformers' processor names it
SIZES_OF_COLOURS = {"red": (50, 37), "green": (20, 60), "white": (64, 64)}  # noise looks alike to so small a tower
FIRST, SECOND, THIRD = (Image.new("RGB", size, colour) for colour, size in SIZES_OF_COLOURS.items())
NUM_LONG_TOKENS = 100  # so many that a kill comes in the middle


@dataclass
class Server:
    cluster: Cluster
    model: Path
    variant: str

    @cached_property
    def truth(self) -> PreTrainedModel:
        return load_true_model(self.model, self.variant)

    @cached_property
    def processor(self) -> Blip2Processor:
        """Of transformers: it puts a picture's tokens before those of the text."""
        pixels = BlipImageProcessorPil(**VARIANTS["blip2"].processor)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        return Blip2Processor(pixels, tokenizer, VARIANTS["blip2"].config["num_query_tokens"])

    @torch.inference_mode()
    def expected(self, text: str, picture: Image.Image, max_tokens: int) -> list[int]:
        """What transformers generates greedily."""
        given = self.processor(images=picture, text=text, return_tensors="pt")
        output = self.truth.generate(**given, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
        has_encoder = self.truth.config.is_encoder_decoder
        return output[0, 1 if has_encoder else given["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module", params=["blip2", "blip2_t5"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("blip2")
    model = make_served_vision_model(directory / "model", request.param, IMAGE_TOKEN, None)
    settings = {"model.path": model, "scheduler.max_num_batched_tokens": 64, "attention.num_blocks": 200}
    with running_cluster(directory, *(f"{key}={value}" for key, value in settings.items()), is_warm=True) as cluster:
        yield Server(cluster, model, request.param)
        cluster.wait_idle()


def picture_part(picture: Image.Image) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_chats_become_the_questions_that_the_model_was_trained_for(server: Server) -> None:
    """Without a chat template in the files: all pictures, then the text; a picture alone is described."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    asked = {"model": "model", "max_tokens": 12, "temperature": 0, "extra_body": extra}
    first = {"role": "user", "content": [text_part("What is it?"), picture_part(FIRST)]}
    turns = [first, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Why?"}]
    texts = {
        "Question: What is it? Answer:": [first],
        "": [{"role": "user", "content": [picture_part(FIRST)]}],
        "Question: What is it? Answer: A cat. Question: Why? Answer:": turns,
    }
    with openai_client(server.cluster) as client:
        for text, messages in texts.items():
            answer = client.chat.completions.create(messages=messages, **asked)
            assert answer.choices[0].token_ids == server.expected(text, FIRST, 12), text


def prompt_message(text: str, picture: Image.Image, max_tokens: int) -> gateway_pb2.GenerateRequest:
    """A prompt of text beside a picture, over gRPC."""
    message = gateway_pb2.GenerateRequest(prompt=text, max_tokens=max_tokens, ignore_eos=True)
    message.sampling.temperature = 0.0
    message.pictures.add(data=png(picture))
    return message


def test_streams_survive_kills_beside_hostile_pictures(server: Server) -> None:
    prompts = [("Question: What? Answer:", FIRST), ("A photo of", SECOND), ("this is", THIRD), ("A photo of", FIRST)]
    expected = [server.expected(text, picture, NUM_LONG_TOKENS) for text, picture in prompts]
    assert len({tuple(each) for each in expected}) == len(expected), "pictures and texts matter"
    messages = [prompt_message(text, picture, NUM_LONG_TOKENS) for text, picture in prompts]

    def disturb() -> None:
        server.cluster.kill("dense_worker", "attn_worker")
        with openai_client(server.cluster) as client:
            for url in ("data:image/png;base64,AAAA", data_url(noise(50, 37, 1))[:200], "http://127.0.0.1:1/a.png"):
                head = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
                with pytest.raises(openai.BadRequestError):
                    client.chat.completions.create(model="model", messages=[head], max_tokens=1)

    found = collect_all(server.cluster.gateway, messages, disturb)
    assert [each.token_ids[0] for each in found] == expected
    server.cluster.wait_idle()
