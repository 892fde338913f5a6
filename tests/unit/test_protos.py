"""The committed stubs are what the `.proto` files generate, and every field is explained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROTOS = sorted((REPOSITORY / "protos").glob("*.proto"))
FIELD = re.compile(r"^\s+(optional |repeated )?[\w.]+ \w+ = \d+;|^\s+[A-Z_]+ = \d+;|^\s+rpc ")


def test_committed_stubs_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "protos/generate.py", str(tmp_path)], cwd=REPOSITORY, check=True)
    committed = REPOSITORY / "services" / "pb"
    generated = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(generated) == {path.name for path in committed.glob("*_pb2*")}
    for name, text in generated.items():
        assert (committed / name).read_text() == text, f"{name} is stale: run `make protos`"


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.name)
def test_every_field_value_and_call_has_a_comment(proto: Path) -> None:
    lines = proto.read_text().splitlines()
    for number, line in enumerate(lines):
        if FIELD.match(line):
            assert lines[number - 1].strip().startswith("//"), f"{proto.name}:{number + 1}: {line.strip()}"
