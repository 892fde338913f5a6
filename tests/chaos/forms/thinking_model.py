"""The embedded model with tokens for reasoning, in place of its two newest ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from services.common.config import EMBEDDED_MODEL

BEGIN, END = "<think>", "</think>"
BEGIN_ID, END_ID = 1022, 1023


def make_thinking_model(path: Path) -> Path:
    """Writes it into `path`. Only its tokenizer differs."""
    shutil.copytree(EMBEDDED_MODEL, path)
    give_markers(path)
    return path


def give_markers(path: Path) -> None:
    """Gives the tokenizer in `path`, that of the embedded model, these tokens."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    bpe, names = tokenizer["model"], {BEGIN_ID: BEGIN, END_ID: END}
    lost = {token for token, token_id in bpe["vocab"].items() if token_id in names}
    bpe["vocab"] = {token: token_id for token, token_id in bpe["vocab"].items() if token not in lost}
    bpe["merges"] = [pair for pair in bpe["merges"] if not lost & {*pair, "".join(pair)}]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": name, "special": True, **flags} for token_id, name in names.items()
    ]
    bpe["vocab"] |= {name: token_id for token_id, name in names.items()}
    file.write_text(json.dumps(tokenizer))
