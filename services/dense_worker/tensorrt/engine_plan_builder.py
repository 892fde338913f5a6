"""Finds the plans of a model's segments in a cache and builds missing ones, for `build` and the worker.

Each profile has a plan of its own: in a plan for one token alone all shapes are static, so that TensorRT finds faster
kernels, and a changed list of profiles needs only plans for the new ones.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import onnx
import torch

from services.common.errors import CapacityError, ConfigError
from services.common.terminal import progress_bar
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine_plan_cache import (
    CachedEnginePlan,
    EnginePlanCache,
    EnginePlanKey,
    EnginePlanRecord,
    EnginePlans,
)
from services.dense_worker.tensorrt.files.network_record import NetworkRecord
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_forms import fit_products
from services.dense_worker.tensorrt.onnx_segments import code_dtypes, describe_tensors
from services.dense_worker.tensorrt.profiles import Limits, Profile, num_reached, parse_profile

Report = Callable[[str], None]


class EnginePlanBuilder:
    """Builds plans with one TensorRT on one GPU, for one set of profiles.

    TensorRT-RTX needs no GPU to build, and its plans run on every GPU that it supports. Raises ConfigError if TensorRT
    cannot build here.
    """

    def __init__(
        self,
        api: TensorRT,
        gpu: Gpu | None,
        profiles: Sequence[Profile],
        cache: EnginePlanCache,
        limits: Limits | None = None,
    ) -> None:
        """`limits`: only plans of profiles that these reach are found and built; None: those of all."""
        if gpu is not None:
            api.check_gpu(gpu)
        elif not api.is_rtx:
            raise ConfigError(f"{api.name} builds on the GPU that will run the plan, and torch sees none")
        self._api = api
        self._gpu = gpu
        self._profiles = profiles
        self._cache = cache
        self._limits = limits

    def find_or_build(
        self, networks: Mapping[str, bytes], dtype: torch.dtype, build_command: str | None, report: Report
    ) -> EnginePlans:
        """The plans of every segment's ONNX model, by name. `report` receives lines about the progress.

        With `build_command` nothing is built: a missing plan raises a ConfigError that names the command. Also raises
        ConfigError if a plan cannot be built, and CapacityError if the disk is full.
        """
        self._api.check_dtype(dtype)
        self._api.check_codes({each for network in networks.values() for each in code_dtypes(network)})
        plans: dict[str, list[CachedEnginePlan]] = {name: [] for name in networks}
        digests = {name: hashlib.sha256(network).hexdigest() for name, network in networks.items()}
        titled = self._titled_keys(digests, dtype)
        missing = {key for _, key in titled if self._cache.find(key) is None} if build_command is None else set()
        with progress_bar("building TensorRT plans", len(missing), " plans") as advance:
            for title, key in titled:
                network = networks[key.segment]
                plans[key.segment].append(self._find_or_build(key, network, dtype, build_command, title, report))
                advance(int(key in missing))
        return plans

    def find_recorded_or_build(
        self,
        record: NetworkRecord,
        export: Callable[[], Mapping[str, bytes]],
        dtype: torch.dtype,
        build_command: str | None,
        report: Report,
    ) -> EnginePlans:
        """The same, without an export if the record knows the networks and no plan is missing."""
        digests = record.read()
        plans = None if digests is None else self.find(digests, dtype, report)
        if plans is None:
            networks = export()
            plans = self.find_or_build(networks, dtype, build_command, report)
            record.write(networks, report)
        return plans

    def find(self, digests: Mapping[str, str], dtype: torch.dtype, report: Report) -> EnginePlans | None:
        """The plans of networks of which only the sha256 is known, by segment; None if a plan is missing."""
        plans: dict[str, list[CachedEnginePlan]] = {name: [] for name in digests}
        lines = []
        for title, key in self._titled_keys(digests, dtype):
            cached = self._cache.find(key)
            if cached is None:
                return None
            plans[key.segment].append(cached)
            lines.append(_found(title, key))
        for line in lines:
            report(line)
        return plans

    def _titled_keys(self, digests: Mapping[str, str], dtype: torch.dtype) -> list[tuple[str, EnginePlanKey]]:
        """The keys of all plans, with what messages call them."""
        keys = [
            self._key(name, digest, dtype, profile)
            for name, digest in digests.items()
            for profile in self._reached(name)
        ]
        return [(f"[{number}/{len(keys)}] {key.title}", key) for number, key in enumerate(keys, 1)]

    def _reached(self, name: str) -> Sequence[Profile]:
        """The profiles of which a segment has plans."""
        limits = self._limits
        return self._profiles if limits is None else self._profiles[: num_reached(self._profiles, limits.of(name))]

    def _find_or_build(
        self,
        key: EnginePlanKey,
        network: bytes,
        dtype: torch.dtype,
        build_command: str | None,
        title: str,
        report: Report,
    ) -> CachedEnginePlan:
        cached = self._cache.find(key)
        if cached is not None:
            report(_found(title, key))
            return cached
        if build_command is not None:
            why = self._cache.why_missing(key)
            raise ConfigError(
                f"{self._cache.directory} has no plan for the segment {key.title} ({why}) and dense.build is "
                f"'never': run `{build_command}`"
            )
        with self._cache.lock(report):
            cached = self._cache.find(key)  # another process may have built it while this one waited
            if cached is None:
                report(f"{title}: building, {self._cache.why_missing(key)}")
                cached = self._build(key, network, dtype, report)
        megabytes, seconds = cached.record.plan_bytes / 1e6, cached.record.build_s
        report(f"{title}: built {key.plan_name}, {megabytes:.2f} MB in {seconds} s")
        return cached

    def _build(self, key: EnginePlanKey, network: bytes, dtype: torch.dtype, report: Report) -> CachedEnginePlan:
        driver = "" if self._gpu is None else self._gpu.driver
        start = time.monotonic()
        profile = parse_profile(key.profile)
        if not self._api.is_strongly_typed:
            network = fit_products(network, profile)
        graph = onnx.load_from_string(network).graph
        sizes = {name: (profile.low, profile.best, profile.high) for name in _dynamic_inputs(graph)}
        timing_cache = self._cache.timing_cache(key, driver, report)
        plan, timings = self._api.build(key.title, network, sizes, dtype, timing_cache)
        build_s = time.monotonic() - start
        layers = None if self._gpu is None else self._api.load(key.title, plan).layers()
        record = EnginePlanRecord(
            key=key,
            plan_sha256=hashlib.sha256(plan).hexdigest(),
            plan_bytes=len(plan),
            build_s=round(build_s, 2),
            inputs=describe_tensors(graph.input),
            outputs=describe_tensors(graph.output),
            operators=dict(Counter(node.op_type for node in graph.node)),
            layers=layers,
        )
        cached = CachedEnginePlan(record, plan)
        self._cache.store(cached)
        if timings:
            try:
                self._cache.store_timing_cache(key, driver, timings)
            except (CapacityError, ConfigError) as error:  # later builds take longer, and nothing else
                report(f"timings are not kept: {error}")
        return cached

    def _key(self, name: str, digest: str, dtype: torch.dtype, profile: Profile) -> EnginePlanKey:
        return EnginePlanKey(
            segment=name,
            dtype=str(dtype).removeprefix("torch."),
            tensorrt=self._api.name,
            gpu="any" if self._api.is_rtx else self._gpu.name,
            num_sms=0 if self._api.is_rtx else self._gpu.num_sms,
            profile=str(profile),
            network=digest,
        )


def _found(title: str, key: EnginePlanKey) -> str:
    return f"{title}: found {key.plan_name}"


def _dynamic_inputs(graph: onnx.GraphProto) -> list[str]:
    """The inputs whose dimension 0 is the number of tokens or rows."""
    dimensions = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    return [name for name, dims in dimensions.items() if dims and dims[0].dim_param]
