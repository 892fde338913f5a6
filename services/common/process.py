"""This process: its end, its memory, its modules."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """This process gets SIGINT (end at once) when its parent ends, however that happens.

    The kernel sends SIGCONT, the one signal that both wakes a stopped process and lets it clean up.
    """

    def end_if_orphaned(*_: object) -> None:
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGCONT, end_if_orphaned)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    end_if_orphaned()  # it may have ended already


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While a service's modules are imported, which live as long as it does.

    The garbage collector looks at them neither now nor later: it would take a fifth of the time, and afterwards each
    full collection would hold up all streams for a quarter of a second. And transformers believes that there is no
    torch: for a config.json or a tokenizer, which is all we ask of it, it would import torch's compiler, for 2 s.
    """
    gc.disable()
    _import_transformers_without_torch()
    yield
    gc.freeze()
    gc.enable()


def _import_transformers_without_torch() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would advise to install torch
    torch = sys.modules.get("torch")
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers.utils import is_torch_available

    is_torch_available()  # it keeps the answer
    if torch is None:
        del sys.modules["torch"]
    else:
        sys.modules["torch"] = torch


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared pages included."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
