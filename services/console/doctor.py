"""`twostroke doctor`: whether this machine can serve, in one line for each thing, with a mend where something is wrong.

It takes the options of `twostroke serve`, to look at the same ports, directories and model. It starts nothing and
imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.channel.region import SHM_DIR
from services.common.config import Config
from services.common.errors import CapacityError, ConfigError, ModelError
from services.common.max_model_len import check_max_model_len, read_shape
from services.common.process import importing
from services.common.several_attention_workers import devices_of_workers
from services.common.tokenizer_files import check_tokenizer
from services.gateway.resources.open_files import RESERVE
from services.launch.addresses import check_free
from services.launch.arguments import parse_args
from services.launch.gguf import is_gguf
from services.launch.gpus import torch_cuda
from services.launch.hub import is_hub_name
from services.launch.memory_plan import plan_memory
from services.launch.mps import CONTROL, has_gpu
from services.launch.passed_sockets import check_same_address

DESCRIPTION = (
    "Says in a line for each thing whether this machine can serve with these options of `twostroke serve`, and what "
    "mends it if not. Starts and downloads nothing. The exit status is 1 if a start would fail."
)
GIB = 2**30
LEAST_SHM_BYTES = 16 * 2**20  # the embedded model needs a fifth of it
GOOD_SHM_BYTES = GIB  # as the compose files set it; a model of 7 billion parameters and its standby need 70 MB
LEAST_DISK_BYTES = 2**28
GOOD_PLAN_BYTES = 2 * GIB  # plans of TensorRT, compiled kernels
DRIVER_FILE = Path("/proc/driver/nvidia/version")
LEAST_DRIVERS = {12: 525, 13: 580}  # major version of CUDA, and the oldest driver whose branch runs it
ROOT = Path(__file__).parents[2]
SOCKET_UNIT = "twostroke.socket"  # of deploy/systemd
SYSTEMCTL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one subject. `mend` says what to do, unless the state is `ok`."""

    state: Literal["ok", "warning", "failure"]
    subject: str
    text: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.state:8} {self.subject}: {self.text}" + (f"; {self.mend}" if self.mend else "")


def main(argv: list[str], program: str = "twostroke doctor") -> int:
    """Prints all findings. Returns the exit status: 1 if something will fail, else 0, also with warnings."""
    config, arguments = parse_args(argv, program, downloads=False, description=DESCRIPTION)
    states = []
    model = arguments.model
    name = model if model is not None and (is_hub_name(model) or is_gguf(model)) else None
    for finding in examine(config, name):
        print(finding)
        states.append(finding.state)
    num_failures, num_warnings = states.count("failure"), states.count("warning")
    failures, warnings = (
        f"{number} {word}{'' if number == 1 else 's'}"
        for number, word in ((num_failures, "failure"), (num_warnings, "warning"))
    )
    print(f"{len(states)} checks, {failures}, {warnings}")
    return 1 if num_failures else 0


def examine(config: Config, hub_name: str | None) -> Iterator[Finding]:
    """All findings, in the order in which a start would meet them. `hub_name`: what a start downloads or converts."""
    yield check_python()
    yield check_packages(installed_requirements())
    yield from check_gpu(config)
    yield check_shared_memory(shutil.disk_usage(SHM_DIR).free if SHM_DIR.is_dir() else None)
    yield check_open_files(config, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield check_port("gateway.address", config.gateway.address)
    yield check_http_port(config, address_of_unit())
    yield check_directory("temporary directory", Path(tempfile.gettempdir()), LEAST_DISK_BYTES, "set TMPDIR")
    if has_gpu() and config.dense.device != "cpu":
        plans = config.dense.plan_dir.expanduser()
        yield check_directory("directory of TensorRT plans", plans, GOOD_PLAN_BYTES, "set dense.plan_dir")
    if hub_name is None:
        yield check_model(config)
        yield from check_memory(config)
    else:
        first = "converts it" if is_gguf(hub_name) else "downloads what the cache lacks"
        yield Finding("ok", "model", f"{hub_name} is not examined: serve {first}")


def check_python() -> Finding:
    """Which Python runs this."""
    return Finding("ok", "Python", f"{sys.version.split()[0]} at {sys.executable}")


def installed_requirements() -> list[str]:
    """What the installed package requires, or in a checkout requirements.txt, each as `NAME==VERSION`."""
    file = ROOT / "requirements.txt"
    if file.is_file():
        lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line]
    return [each for each in importlib.metadata.requires("twostroke") or () if ";" not in each]


def check_packages(requirements: list[str]) -> Finding:
    """Whether the pinned packages are installed, each in its version. A build (`2.13.0+cpu`) counts as its version."""
    wrong = []
    for requirement in requirements:
        name, _, wanted = requirement.partition("==")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append((requirement, f"{name} is not installed, {wanted} is needed"))
            continue
        if found.partition("+")[0] != wanted:
            wrong.append((requirement, f"{name} is {found}, tested with {wanted}"))
    if not wrong:
        return Finding("ok", "packages", f"{len(requirements)} have the versions that were tested")
    state = "failure" if any("not installed" in text for _, text in wrong) else "warning"
    mend = f"{sys.executable} -m pip install {' '.join(requirement for requirement, _ in wrong)}"
    return Finding(state, "packages", ", ".join(text for _, text in wrong), mend)


def check_gpu(config: Config) -> Iterator[Finding]:
    """The driver against the CUDA version of torch, and the program of MPS."""
    if "cpu" in (config.dense.device, config.attention.device):
        yield Finding("ok", "GPU", "not used: a device of the config is 'cpu'")
        return
    cuda = torch_cuda()
    if not has_gpu():
        if any(each.startswith("cuda") for each in (config.dense.device, *devices_of_workers(config))):
            yield Finding("failure", "GPU", "the config asks for one, and there is none", "set both devices to auto")
        else:
            yield Finding("ok", "GPU", "none: everything runs on the CPU")
        return
    if cuda is None:
        mend = "install the build for CUDA, which is the one at PyPI: set no extra index"
        yield Finding("warning", "GPU", "torch is built for CPUs, the GPU is not used", mend)
        return
    yield check_driver(driver_version(), cuda)
    if shutil.which(CONTROL) is None:
        mend = "install it with the driver (nvidia-compute-utils), or give each worker its own GPU"
        yield Finding("warning", "MPS", f"no {CONTROL}: every handoff is about 20 times slower", mend)
    else:
        yield Finding("ok", "MPS", f"{CONTROL} at {shutil.which(CONTROL)}")


def check_driver(driver: str | None, cuda: str) -> Finding:
    """Whether the driver is new enough for `cuda`, such as "13.0"."""
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0]))
    if driver is None or least is None:
        text = f"driver {driver or 'unknown'}, torch has CUDA {cuda}: not known whether they fit"
        return Finding("warning", "GPU", text, "nvidia-smi shows the newest CUDA that the driver runs")
    if int(driver.partition(".")[0]) < least:
        mend = f"update the driver to {least} or newer"
        return Finding("failure", "GPU", f"driver {driver} is too old for torch's CUDA {cuda}", mend)
    return Finding("ok", "GPU", f"driver {driver}, torch has CUDA {cuda}")


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None if the kernel does not say it."""
    try:
        found = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", DRIVER_FILE.read_text())
    except OSError:
        return None
    return found and found[1]


def check_shared_memory(num_bytes: int | None) -> Finding:
    """Whether `num_bytes` free bytes of /dev/shm suffice for the regions in which the workers meet."""
    mend = "in a container: --shm-size 1g, or --ipc=host"
    if num_bytes is None:
        return Finding("failure", str(SHM_DIR), "is not there, and the workers meet in it", mend)
    text = f"{num_bytes / GIB:.2f} GiB free"
    if num_bytes < LEAST_SHM_BYTES:
        return Finding("failure", str(SHM_DIR), f"{text}, too little for what the workers exchange", mend)
    if num_bytes < GOOD_SHM_BYTES:
        return Finding("warning", str(SHM_DIR), f"{text}, perhaps too little for a large model", mend)
    return Finding("ok", str(SHM_DIR), text)


def check_open_files(config: Config, most: int) -> Finding:
    """Whether `most` open files, the hard limit of a process, suffice for all connections."""
    section = config.gateway
    needed = section.max_connections + section.max_grpc_connections + section.num_dense_streams + RESERVE
    if most == resource.RLIM_INFINITY or most >= needed:
        return Finding("ok", "open files", f"{'any number' if most == resource.RLIM_INFINITY else most} may be open")
    text = f"{most} may be open, all connections need {needed}: fewer connections are accepted"
    return Finding("warning", "open files", text, f"ulimit -n {needed}, or LimitNOFILE={needed} of a systemd unit")


def check_port(key: str, address: str) -> Finding:
    """Whether the gateway can listen there."""
    try:
        check_free(address, key)
    except ConfigError as error:
        return Finding("failure", "port", str(error))  # which says what to do
    return Finding("ok", "port", f"{key} {address} is free")


def check_http_port(config: Config, held: str | None) -> Finding:
    """Whether the gateway can listen there, or systemd already does so for it, at `held`."""
    finding = check_port("gateway.http_address", config.gateway.http_address)
    if finding.state == "ok" or held is None:
        return finding
    try:
        check_same_address(config, held)
    except ConfigError as error:
        return Finding("failure", "port", str(error))
    own = config.gateway.http_address
    if held.rpartition(":")[2] != own.rpartition(":")[2]:  # so somebody else has the port
        text = f"gateway.http_address {own} is in use, and systemd's {SOCKET_UNIT} listens at {held} for the server"
        return Finding("warning", "port", text, "let systemd start it, or choose another port by --port")
    return Finding("ok", "port", f"gateway.http_address {held} is held by systemd's {SOCKET_UNIT} for the server")


def address_of_unit() -> str | None:
    """Where systemd listens for `twostroke.service`; None if it does not, or if there is no systemd."""
    command = ["systemctl", "show", SOCKET_UNIT, "--property=ActiveState", "--property=Listen"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^Listen=(.+) \(Stream\)$", shown, re.MULTILINE)
    if found is None or "ActiveState=active\n" not in f"{shown}\n":
        return None
    return f"unix:{found[1]}" if found[1].startswith(("/", "@")) else found[1]


def check_directory(subject: str, directory: Path, least: int, mend: str) -> Finding:
    """Whether a directory, which may not exist yet, can be written and has `least` bytes left."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("failure", subject, f"{directory} cannot be written", f"{mend} to another directory")
    free = shutil.disk_usage(existing).free
    text = f"{directory} has {free / GIB:.1f} GiB left"
    if free < least:
        return Finding("warning", subject, f"{text}, less than {least / GIB:g} GiB", f"make room, or {mend}")
    return Finding("ok", subject, text)


def check_model(config: Config) -> Finding:
    """Whether the model is supported, as long as is asked for, its weights are in a format that is read, and it has a
    tokenizer.
    """
    path = config.model.path
    try:
        check_max_model_len(config.model, read_shape(config))
        with importing():
            from services.common.vision.vision_config import why_blind
        lack = why_blind(path) if config.model.images else None
    except ConfigError as error:
        return Finding("failure", "model", str(error))  # which says what to do
    except ModelError as error:
        return Finding("failure", "model", str(error), "docs/models.md lists the supported families")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        if config.model.load_format == "dummy":
            return Finding("ok", "model", f"{path}: random weights")
        mend = "download the model whole; other formats are not read"
        return Finding("failure", "model", f"{path} has no safetensors", mend)
    try:
        if config.model.load_format != "dummy":
            check_tokenizer(path)
    except ModelError as error:
        return Finding("failure", "model", str(error), "download the model whole")
    if lack is not None:
        return Finding("warning", "model", f"{lack}: its text part alone is served", "download the model whole")
    num_bytes = sum(file.stat().st_size for file in files)
    return Finding("ok", "model", f"{path} has {num_bytes / GIB:.2f} GiB of weights")


def check_memory(config: Config) -> Iterator[Finding]:
    """Whether what a start needs fits into each kind of memory."""
    try:
        places = plan_memory(config)
    except ModelError as error:
        yield Finding("failure", "memory", str(error), "download the model again")
        return
    for place in places:
        try:
            place.check()
        except CapacityError as error:
            yield Finding("failure", "memory", str(error))
        else:
            parts = ", ".join(f"{need.what} {need.num_bytes / GIB:.2f}" for need in place.needs)
            text = f"{place.name} has {place.free_bytes / GIB:.2f} GiB free, {place.num_bytes / GIB:.2f} GiB are needed"
            yield Finding("ok", "memory", f"{text} ({parts})")
