"""The server of a benchmark's own: its random weights get a vocabulary of the true size."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.gpu.models import SHAPES, write_model
from bench.load.own_server import OwnServer, add_server_options, open_server, write_vocabulary
from services.common.model_config import load_model_config
from services.grammar.vocabulary import read_vocabulary


@pytest.mark.parametrize("shape", ["tiny", "llama-2-7b"])
def test_a_shape_gets_as_many_tokens_as_logits(tmp_path: Path, shape: str) -> None:
    model = write_model(tmp_path / "model", shape, "stored")
    write_vocabulary(model)
    size, tokenizer = SHAPES[shape]["vocab_size"], Tokenizer.from_file(str(model / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    text = "Name a city: 東京, 42!"
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids) == text
    config = load_model_config(model)
    vocabulary = read_vocabulary(model, config.vocab_size, config.eos_token_ids)
    assert vocabulary.num_tokens == size and vocabulary.load().vocab_size == size


def test_a_running_server_is_used_as_it_is() -> None:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    options = parser.parse_args(["--address", "198.51.100.1:50051", "--model", "of-the-server"])
    with open_server(options) as server:
        assert server == OwnServer("198.51.100.1:50051", Path("of-the-server"))
