"""The command that builds the plans that a dense worker needs, for the message of a worker that may not build."""

from __future__ import annotations

import shlex

from services.common.config import DenseSection, ModelSection
from services.common.resolve import ResolvedModel


def build_command(section: DenseSection, source: ModelSection, model: ResolvedModel) -> str:
    """For a shell: builds with `services.dense_worker.tensorrt.build` what a worker with this config looks for.

    Every setting that a plan depends on is there, so that the command needs no config.
    """
    arguments = [
        *("--model", source.path.absolute()),
        *("--load-format", source.load_format),
        *("--dtype", str(model.dtype).removeprefix("torch.")),
        *("--profiles", section.profiles),
        *("--quantization", section.quantization),
        *("--device", model.device),
        *("--output-dir", section.plan_dir.expanduser().absolute()),
    ]
    if source.num_layers is not None:
        arguments += ["--num-layers", source.num_layers]
    return shlex.join(["python", "-m", "services.dense_worker.tensorrt.build", *map(str, arguments)])
