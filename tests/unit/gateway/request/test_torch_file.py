"""Files of `torch.save`: every dense tensor is read as it was, and whatever else a file may be is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.gateway.request.torch_file import read_saved_tensor
from tests.support.examples import examples
from tests.support.torch_files import changed, hostile_files, saved

VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: VALUES,
    "float16": VALUES.half,
    "bfloat16": VALUES.bfloat16,
    "a part of a larger one": lambda: VALUES[2:5],
    "columns": lambda: VALUES.t(),
    "one row for all": lambda: VALUES[:1].expand(3, 4),
    "a parameter": lambda: torch.nn.Parameter(VALUES),
    "with a gradient": lambda: VALUES.clone().requires_grad_(),
    "of a batch": lambda: VALUES[None],
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_read_as_it_was_saved(kind: str) -> None:
    tensor = TENSORS[kind]()
    found = read_saved_tensor(saved(tensor), "x")
    assert found.dtype == tensor.dtype and torch.equal(found, tensor) and not found.requires_grad


@pytest.mark.parametrize("kind", hostile_files(""))
def test_a_file_that_is_no_tensor_is_refused_and_runs_no_code(kind: str, tmp_path: Path) -> None:
    marker = tmp_path / "code has run"
    with pytest.raises(InvalidRequest, match=r"^prompt_embeds\[1\] ") as refused:
        read_saved_tensor(hostile_files(str(marker))[kind], "prompt_embeds[1]")
    assert refused.value.param == "prompt_embeds[1]" and len(str(refused.value)) < 400
    assert not marker.exists()


def test_hostile_files_take_no_memory(tmp_path: Path) -> None:
    """In a process whose memory is limited, so that no claim of a file can be met."""
    program = (
        "import resource, sys, torch\n"
        "from services.common.errors import InvalidRequest\n"
        "from services.gateway.request.torch_file import read_saved_tensor\n"
        "from tests.support.torch_files import hostile_files\n"
        "files = hostile_files('/nonexistent/file')\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))\n"
        "for kind, data in files.items():\n"
        "    try:\n"
        "        read_saved_tensor(data, 'x')\n"
        "    except InvalidRequest as error:\n"
        "        assert 'emory' not in str(error), (kind, error)\n"
        "    else:\n"
        "        sys.exit(kind)\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_damaged_files_are_refused_or_read(data: st.DataObject) -> None:
    """Bytes changed anywhere: nothing but the one error comes out."""
    damaged = bytearray(saved(VALUES))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_saved_tensor(bytes(damaged), "x")
    except InvalidRequest as error:
        assert str(error).startswith("x ")


@given(st.binary(max_size=200))
@settings(max_examples=examples(100), deadline=None)
def test_any_pickle_is_refused_or_a_tensor(content: bytes) -> None:
    file = changed(saved(VALUES), lambda entries: entries.update({"data.pkl": b"\x80\x02" + content}))
    with pytest.raises(InvalidRequest, match=r"^x "):
        read_saved_tensor(file, "x")
