"""Settings of every test process."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # the services under test need the other cores
