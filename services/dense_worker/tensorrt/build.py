"""`python -m services.dense_worker.tensorrt.build`: builds the TensorRT plans of a model's segments, or shows plans.

Plans that exist are not built again. Each segment has a plan for each profile, or one for all if the weights are
constants. No weights are read: they are inputs of a plan, or it gets them after loading. So a `middle` plan serves all
layers, and 33 layers take no longer than 3. On a GPU it also measures for which sizes torch is faster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from services.common.cli import dashed
from services.common.errors import ConfigError, TwostrokeError
from services.common.model_config import ModelConfig, load_model_config
from services.common.terminal import ERASE_LINE
from services.common.vision.vision_config import VisionConfig, load_vision_config
from services.dense_worker.backends.torch_on_device import torch_backend
from services.dense_worker.encoders.vision.operations import PREFIX
from services.dense_worker.encoders.vision.tensorrt.tower_plans import PROFILES
from services.dense_worker.model.on_the_fly import with_quantization
from services.dense_worker.model.weights import weights_hash
from services.dense_worker.tensorrt.api import TensorRT, load_tensorrt, require
from services.dense_worker.tensorrt.build_options import PROGRAM, make_parser
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache, EnginePlanRecord, EnginePlans
from services.dense_worker.tensorrt.files.manifest import read_manifest, read_networks
from services.dense_worker.tensorrt.files.network_record import NetworkRecord
from services.dense_worker.tensorrt.gpu import current_gpu, on_device
from services.dense_worker.tensorrt.measure import known_measurements, measure_plans, store_measurements
from services.dense_worker.tensorrt.profiles import Limits, check_cover, parse_profiles


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Returns the exit status: 0, or 1 after an error. `program` is its name in its usage and errors."""
    parser = make_parser(program)
    arguments = parser.parse_args(dashed(sys.argv[1:] if argv is None else argv))
    has_model = arguments.model is not None or arguments.onnx is not None
    if not (has_model or arguments.inspect):
        parser.error("one of --model DIR and --onnx OUT is needed, except with --inspect")
    cache = EnginePlanCache(arguments.output_dir.expanduser())
    try:
        records = build(arguments, cache) if has_model else cache.records()
        if arguments.inspect:
            inspect(cache, records)
    except TwostrokeError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0


def build(arguments: argparse.Namespace, cache: EnginePlanCache) -> list[EnginePlanRecord]:
    """The model's plans; missing ones are built. Raises ModelError, ConfigError or CapacityError."""
    require("onnx")
    from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder

    profiles, device = parse_profiles(arguments.profiles), torch.device(arguments.device)
    most = profiles[-1].high
    limits = Limits(arguments.max_num_batched_tokens or most, arguments.max_num_seqs or most)
    check_cover(profiles, limits)  # now, because builds take long
    config, vision, dtype, networks = _read_networks(arguments)
    of_tower = {name: networks.pop(name) for name in [*networks] if name.startswith(PREFIX)}
    groups = [(config, networks, profiles, limits)] + ([(vision, of_tower, PROFILES, None)] if of_tower else [])
    records = [
        (NetworkRecord(cache.directory, source, dtype), own) for source, own, *_ in groups if source is not None
    ]
    api, gpu = load_tensorrt(), current_gpu(device)
    print(f"{api.name}, {gpu or 'no GPU'}, {str(dtype)[6:]}, in {cache.directory}", flush=True)
    with on_device(device):
        plans = [
            EnginePlanBuilder(api, gpu, each, cache, reached).find_or_build(own, dtype, None, _print)
            for _, own, each, reached in groups
        ]
        if gpu is not None and config is not None:
            _measure(api, cache, plans[0], config, dtype, device, limits)
    for record, own in records:
        record.write(own, _print)
    return [cached.record for of_part in plans for of_segment in of_part.values() for cached in of_segment]


def inspect(cache: EnginePlanCache, records: Sequence[EnginePlanRecord]) -> None:
    """Prints the record of each plan. Raises ConfigError if there is none."""
    if not records:
        raise ConfigError(f"{cache.directory} holds no plans")
    for record in records:
        _print_record(record)


def _read_networks(
    arguments: argparse.Namespace,
) -> tuple[ModelConfig | None, VisionConfig | None, torch.dtype, dict[str, bytes]]:
    """The ONNX models, exported now or earlier. The configs of text part and tower are None for earlier ones."""
    if arguments.onnx is not None:
        manifest = read_manifest(arguments.onnx)
        if arguments.dtype not in ("auto", manifest.dtype):
            raise ConfigError(
                f"--dtype is {arguments.dtype}, {arguments.onnx} was exported in {manifest.dtype}"
            )
        return None, None, getattr(torch, manifest.dtype), read_networks(arguments.onnx, manifest)
    from services.dense_worker.encoders.vision.tensorrt.tower_networks import export_tower
    from services.dense_worker.tensorrt.onnx_segments import export_networks

    config = load_model_config(arguments.model, arguments.num_layers)
    config = with_quantization(config, arguments.quantization, arguments.model)
    if arguments.load_format != "dummy":
        weights_hash(arguments.model, config)  # refuses a directory that the worker could not load
    dtype = getattr(torch, config.checkpoint_dtype if arguments.dtype == "auto" else arguments.dtype)
    networks, vision = export_networks(config, dtype), load_vision_config(arguments.model)
    return config, vision, dtype, networks if vision is None else networks | export_tower(vision, dtype)


def _measure(
    api: TensorRT,
    cache: EnginePlanCache,
    plans: EnginePlans,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    limits: Limits,
) -> None:
    """Times the plans and torch, unless that was done before, and stores the times beside the plans."""
    if known_measurements(plans, limits) is not None:
        return
    print("measuring TensorRT and torch", flush=True)
    measured = measure_plans(api, plans, config, dtype, device, limits, torch_backend)
    store_measurements(cache, plans, measured)
    for segment, times in measured.items():
        for size, us in times.items():
            print(f"  {segment} {size}: TensorRT {us['tensorrt']} µs, torch {us['torch']} µs")


def _print_record(record: EnginePlanRecord) -> None:
    key = record.key
    print(f"{key.plan_name}: {record.plan_bytes / 1e6:.2f} MB, built in {record.build_s} s")
    print(f"  for       {key.tensorrt}, GPU {key.gpu}, {key.num_sms or 'any number of'} SMs, {key.dtype}")
    print(f"  profile   {key.profile}")
    for title, tensors in (("inputs", record.inputs), ("outputs", record.outputs)):
        print(f"  {title}")
        for tensor in tensors:
            print(f"    {tensor['name']:<16} {tensor['dtype']:<9} {tensor['shape']}")
    print(f"  network   {', '.join(f'{count} {op}' for op, count in sorted(record.operators.items()))}")
    if record.layers is None:
        print("  layers    not known: the plan was built without a GPU, where no engine can be loaded")
        return
    print(f"  layers    {len(record.layers)}")
    for layer in record.layers:
        print(f"    {_describe_layer(layer)}")


def _describe_layer(layer: Any) -> str:
    """Type, tactic and name of a layer; the name of a fused kernel lists the fused layers."""
    if not isinstance(layer, dict):
        return str(layer)
    parts = (layer.get("LayerType"), layer.get("TacticName"), layer.get("Name"))
    return "  ".join(str(part) for part in parts if part)


def _print(line: str) -> None:
    print(f"{ERASE_LINE if sys.stdout.isatty() else ''}{line}", flush=True)  # a bar may stand there


if __name__ == "__main__":
    sys.exit(main())
