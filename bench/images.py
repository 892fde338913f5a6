"""Pictures beside text: tokens/s of many chats at once, the time to the first token of one, and gaps of a text stream.

    python bench/images.py --shape tiny --size 64 --chats 8 --at-once 4                     # on this CPU
    python bench/images.py --shape qwen2.5-vl-7b --size 1024 --chats 128 --at-once 64
    python bench/images.py --shape qwen2.5-vl-7b --size 1024 --roof                         # the arithmetic alone

Models have true shapes and random weights. Each chat has a picture of its own, as a JPEG in a data URL, about 100
tokens of text, and gets 128 tokens; everything goes over HTTP, as clients send it. At the end stand what was measured,
what is required on an H200 for the large shape, and what its tensor cores would allow if they did nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from PIL import Image
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import running_cluster
from tests.support.served_vision import END, IMAGE_TOKEN, START, TEMPLATE

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "text": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "vision": {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64},
        "mrope_section": [2, 3, 3],
    },
    "qwen2.5-vl-7b": {
        "text": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        "vision": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "mrope_section": [16, 24, 24],
    },
}
PATCH, SQUARE, WINDOW = 14, 4, 64  # pixels along a side of a patch; patches of a token, and of a window of 112 pixels
PEAK_TFLOPS = 989.0  # of an H200 or H100 SXM in bfloat16, without sparsity
REQUIRED = {"first token, ms": 60.0, "tokens/s out": 4000.0, "longest gap, ms": 300.0}
TEXT = "What is the capital of France? " * 14  # about 100 tokens of the embedded model


def make_model(path: Path, shape: str) -> Path:
    """The files of a model but its weights."""
    sizes = SHAPES[shape]
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN, START, END]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    ids = tokenizer.convert_tokens_to_ids([IMAGE_TOKEN, START, END])
    text = {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sizes["mrope_section"]},
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": ids[0],
        "vision_start_token_id": ids[1],
        "vision_end_token_id": ids[2],
        "text_config": text | sizes["text"],
        "vision_config": {"model_type": "qwen2_5_vl_vision"} | sizes["vision"],
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12845056}))
    return path


def picture(size: int, seed: int) -> str:
    """A data URL of a JPEG: colours that change slowly, with noise, so that the file has the size of a photograph's."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((size, size), 3)
    noisy = np.asarray(coarse, np.int16) + generator.integers(-12, 13, (size, size, 3))
    buffer = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Work:
    """The multiplications and additions of one new picture, in 10^12."""

    tower: float
    prompt: float

    @classmethod
    def of(cls, shape: str, size: int, num_text_tokens: int) -> Work:
        """Of matrices and attention; norms, activations and the language head of one row are left out."""
        tower, text = SHAPES[shape]["vision"], SHAPES[shape]["text"]
        patches = (round(size / (2 * PATCH)) * 2) ** 2
        hidden, full = tower["hidden_size"], len(tower.get("fullatt_block_indexes", (7, 15, 23, 31)))
        layer = 4 * hidden**2 + 3 * hidden * tower["intermediate_size"]
        merged = SQUARE * hidden
        merger = merged**2 + merged * tower["out_hidden_size"]
        seen = full * patches + max(0, tower["depth"] - full) * min(WINDOW, patches)  # keys of a query, over all layers
        matrices = patches * (tower["depth"] * layer + 3 * 2 * PATCH**2 * hidden) + patches // SQUARE * merger
        of_tower = 2 * matrices + 4 * patches * hidden * seen
        tokens, width = patches // SQUARE + num_text_tokens, text["hidden_size"]
        kv_width = width * text["num_key_value_heads"] // text["num_attention_heads"]
        of_layer = 2 * width**2 + 2 * width * kv_width + 3 * width * text["intermediate_size"]
        of_prompt = text["num_hidden_layers"] * (2 * tokens * of_layer + 2 * tokens**2 * width)  # half is not seen
        return cls(of_tower / 1e12, of_prompt / 1e12)

    def print_roof(self, num_tokens: int) -> dict[str, float]:
        """Prints it; returns what a GPU could reach with nothing else to do, where there is such a figure."""
        total = self.tower + self.prompt
        print(f"a new picture: {self.tower:.1f} TFLOP of the tower, {self.prompt:.1f} of the prompt")
        return {
            "first token, ms": 1e3 * total / PEAK_TFLOPS,
            "tokens/s out": num_tokens * PEAK_TFLOPS / total,
        }


@dataclass
class Measured:
    """One answer."""

    first_token_s: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    times: list[float] = field(default_factory=list)


async def ask(client: httpx2.AsyncClient, url: str | None, max_tokens: int) -> Measured:
    """Sends a chat, which is in JSON when the time begins, and reads its stream."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": TEXT}]
    if url is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    measured, start = Measured(), time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", content=content, headers=headers) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"an answer failed: {chunk}")
            if chunk.get("usage"):
                measured.num_prompt_tokens = chunk["usage"]["prompt_tokens"]
                measured.num_tokens = chunk["usage"]["completion_tokens"]
            elif chunk["choices"]:
                measured.times.append(time.perf_counter())
                if not measured.first_token_s:
                    measured.first_token_s = measured.times[-1] - start
        if response.status_code != 200:
            raise SystemExit(f"a chat was answered {response.status_code}")
    return measured


def client_of(address: str) -> httpx2.AsyncClient:
    transport = httpx2.AsyncHTTPTransport(uds=address.removeprefix("unix:"))
    return httpx2.AsyncClient(transport=transport, base_url="http://gateway", timeout=600)


def times_of_stream(address: str, num_tokens: int) -> list[float]:
    """When the tokens of a text stream come, on the clock of all processes."""

    async def read() -> Measured:
        async with client_of(address) as client:
            return await ask(client, None, num_tokens)

    return asyncio.run(read()).times


async def measure(
    address: str, arguments: argparse.Namespace, urls: Sequence[str], beside: ProcessPoolExecutor
) -> dict[str, float]:
    """Prints what it measures; returns what is required. beside: the process that reads a stream of text."""
    async with client_of(address) as client:
        print(f"a picture has {len(urls[0])} characters")
        for url in urls[:2]:
            await ask(client, url, 8)  # starts the processes that decode
        alone = [await ask(client, url, 2) for url in urls[2:9]]
        again = [await ask(client, url, 2) for url in urls[2:9]]
        text = [await ask(client, None, 2) for _ in range(5)]
        figures = {"first token, ms": 1e3 * statistics.median(each.first_token_s for each in alone)}
        for name, found in (("picture", alone), ("the same picture", again), ("text alone", text)):
            times = [each.first_token_s for each in found]
            print(
                f"alone, {name}: first token after {1e3 * statistics.median(times):.1f} ms (median), "
                f"{1e3 * min(times):.1f} to {1e3 * max(times):.1f}; {found[0].num_prompt_tokens} tokens of prompt"
            )
        limit = asyncio.Semaphore(arguments.at_once)

        async def one(url: str) -> Measured:
            async with limit:
                return await ask(client, url, arguments.tokens)

        # Writing 64 pictures keeps this process busy for 0.2 s, which would count as a gap of the stream.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(beside, times_of_stream, address, 1)  # starts it
        stream = loop.run_in_executor(beside, times_of_stream, address, arguments.stream_tokens)
        await asyncio.sleep(1.0)
        start = time.perf_counter()
        found = await asyncio.gather(*(one(url) for url in urls[9 : 9 + arguments.chats]))
        took_s = time.perf_counter() - start
        output, prompt = sum(each.num_tokens for each in found), sum(each.num_prompt_tokens for each in found)
        first = sorted(each.first_token_s for each in found)
        figures["tokens/s out"] = output / took_s
        print(
            f"{arguments.chats} chats, {arguments.at_once} at once: {took_s:.2f} s, {output / took_s:.0f} tokens/s, "
            f"{(prompt + output) / took_s:.0f} with those of prompts, {arguments.chats / took_s:.1f} pictures/s; first "
            f"token after {first[len(first) // 2]:.2f} s (median), {first[-1]:.2f} s at most"
        )
        start = time.perf_counter()
        found = await asyncio.gather(*(one(urls[9]) for _ in range(arguments.chats)))
        took_s = time.perf_counter() - start
        print(f"the same picture in all: {sum(each.num_tokens for each in found) / took_s:.0f} tokens/s out")
        times = await stream
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
        print(f"a text stream beside it: longest gap {gaps[-1]:.3f} s, {1e3 * gaps[len(gaps) // 2]:.1f} ms mostly")
        return figures | {"longest gap, ms": 1e3 * gaps[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--size", type=int, default=64, help="pixels along a side")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--stream-tokens", type=int, default=1500, help="of the text stream beside the chats")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the services")
    parser.add_argument("--roof", action="store_true", help="print the arithmetic, and measure nothing")
    arguments = parser.parse_args()
    roof = Work.of(arguments.shape, arguments.size, 141).print_roof(arguments.tokens)
    if arguments.roof:
        print(", ".join(f"{name}: {value:.1f}" for name, value in roof.items()))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        settings = {
            "model.path": make_model(directory / "model", arguments.shape),
            "model.load_format": "dummy",
            "model.max_model_len": 4096,
            "scheduler.max_num_batched_tokens": 2048,
            "scheduler.max_num_seqs": arguments.at_once + 1,
            "gateway.max_body_bytes": 2**24,
            "gateway.max_held_bytes": 2**32,
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        beside = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pictures = beside.map(picture, itertools.repeat(arguments.size), range(arguments.chats + 12))  # meanwhile
        with running_cluster(directory, *overrides, *arguments.set) as cluster, beside:
            figures = asyncio.run(measure(cluster.http_address, arguments, list(pictures), beside))
    for name, value in figures.items():
        print(f"{name:18} {value:10.1f}, required {REQUIRED[name]:.0f} (large shape), roof {roof.get(name, 0):.1f}")


if __name__ == "__main__":
    main()
