"""Settings of every test process."""

from __future__ import annotations

import signal

import torch

# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the services under test need the other cores
