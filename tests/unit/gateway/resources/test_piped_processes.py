"""The processes that keep what clients send from the gateway end in silence when their gateway has died."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import WhisperFeatureExtractor

from services.common.config import EMBEDDED_MODEL
from services.common.vision.layouts import describe
from services.common.vision.qwen_vl import QwenLayout

TIMEOUT_S = 60.0  # a start takes seconds
VOCABULARY = {"path": str(EMBEDDED_MODEL), "vocab_size": 1024, "eos_token_ids": [0]}
LAYOUT = QwenLayout(unit=8, min_pixels=64, max_pixels=4096, resample=3)
FORM = {"constraint": "regex", "text": "a+", "choices": []}
PICTURE = {"num_bytes": 3, "max_pixels": 99, "is_low": False, "worker_resizes": False, "path": ""}
CHAT = {
    "template": "{{ 1 }}",
    "messages": [],
    "tools": [],
    "template_kwargs": {},
    "add_generation_prompt": False,
    "continue_final_message": False,
}


@pytest.fixture(scope="module")
def sound_options(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sound")
    WhisperFeatureExtractor().save_pretrained(path)
    return json.dumps({"path": str(path), "max_seconds": 9})


MODULES = {
    "services.grammar.trial": (json.dumps(VOCABULARY), json.dumps(FORM).encode() + b"\n"),
    "services.gateway.images.decode": (json.dumps(describe(LAYOUT)), json.dumps(PICTURE).encode() + b"\nabc"),
    "services.gateway.sound.decode": (None, (3).to_bytes(8, "little") + b"\0abc"),
    "services.gateway.text.client_templates.renderer": ("", json.dumps(CHAT).encode() + b"\n"),
}


@pytest.mark.parametrize("module", MODULES)
def test_a_process_whose_answer_nobody_reads_ends_without_a_word(module: str, sound_options: str) -> None:
    options, message = MODULES[module]
    command = [sys.executable, "-m", module, sound_options if options is None else options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[4]
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.write(message)
    process.stdin.flush()
    try:
        process.wait(TIMEOUT_S)  # although standard input goes on
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.stdin.close()
        process.stderr.close()
