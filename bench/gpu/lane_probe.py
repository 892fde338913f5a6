"""What keeps the steps of two lanes apart on a GPU: which work of one stream waits behind that of another one.

    python bench/gpu/lane_probe.py queues      # work of a stream that waits, and work of a second one behind it
    python bench/gpu/lane_probe.py products    # a stroke's products beside a waiting stream
    python bench/gpu/lane_probe.py dense       # steps of two lanes of a dense worker; a process plays the other worker
    python bench/gpu/lane_probe.py far         # the same as `dense`, with the other worker's memory on a second GPU

But for `far`, one GPU is enough: the other worker is a process on the CPU that answers flags in host memory, one lane
at a time, each after a time that is given. `CUDA_DEVICE_MAX_CONNECTIONS` in the environment changes how many queues
there are.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

NUM_LAYERS = 16
HIDDEN, MIDDLE, QKV, VOCABULARY = 4096, 11008, 12288, 32000
PAGE_BYTES = 4096
FLAGS_OFFSET = 2048  # of the flags that kernels poll, within a lane's page
MOST_S = 100.0  # the whole probe: then the process prints its stacks and ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rows", type=int, default=872)
    parser.add_argument("--peer-us", type=int, help="what the other worker takes for a layer")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(MOST_S, exit=True)
    PARTS[arguments.part](arguments)


class Peer:
    """The other worker: a process that answers one lane's flag after another. Made before CUDA is initialized."""

    def __init__(self, num_lanes: int, asked: Callable[[int], int], answers: Callable[[int], list[int]]) -> None:
        """Both give 64-bit words of the memory, by lane."""
        self.memory = mmap.mmap(-1, PAGE_BYTES * (num_lanes + 1))
        self.words = memoryview(self.memory).cast("Q")
        self._control = PAGE_BYTES * num_lanes // 8
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._run([asked(each) for each in range(num_lanes)], [answers(each) for each in range(num_lanes)])
            finally:
                os._exit(0)

    def set_service(self, microseconds: int) -> None:
        self.words[self._control + 1] = microseconds

    @property
    def served_s(self) -> float:
        return self.words[self._control + 2] * 1e-9

    def stop(self) -> None:
        self.words[self._control] = 1
        os.waitpid(self._pid, 0)

    def _run(self, asked: list[int], answers: list[list[int]]) -> None:
        words, control, now = self.words, self._control, time.perf_counter_ns
        waiting: list[int] = []
        current, ends = -1, 0
        while not words[control] and os.getppid() != 1:
            for _ in range(2000):
                for lane, word in enumerate(asked):
                    if words[word] & 0xFFFFFFFF:
                        words[word] = 0
                        waiting.append(lane)
                if current < 0 and waiting:
                    current = waiting.pop(0)
                    ends = now() + words[control + 1] * 1000
                    words[control + 2] += words[control + 1] * 1000
                if current >= 0 and now() >= ends:
                    for word in answers[current]:
                        words[word] = 1
                    current = -1


def register(memory: mmap.mmap, num_bytes: int) -> tuple[int, object]:
    """The device's address of host memory, and what keeps it."""
    import ctypes

    from cuda.bindings import runtime

    from services.channel.cuda_flags import check

    host = (ctypes.c_char * num_bytes).from_buffer(memory)
    address = ctypes.addressof(host)
    flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
    check(runtime.cudaHostRegister(address, num_bytes, flags))
    return int(check(runtime.cudaHostGetDevicePointer(address, 0))), host


def make_flags(base: int) -> object:
    """The product's flags of a lane whose page the device sees at `base`."""
    from services.channel.cuda_flags import FlagKernels, StreamMemoryOperations

    return FlagKernels(torch.device("cuda", 0), base + FLAGS_OFFSET, base, StreamMemoryOperations(None, base))


def queued_word(lane: int, flag: int) -> int:
    from services.channel.region import flag_word

    return lane * PAGE_BYTES // 8 + flag_word(flag)


def polled_word(lane: int, flag: int) -> int:
    return (lane * PAGE_BYTES + FLAGS_OFFSET + flag * 128) // 8


def probe_queues(arguments: argparse.Namespace) -> None:
    """For each pair of operations: does that of stream j end while that of stream i waits for a flag?"""
    from services.channel import Flag

    memory = mmap.mmap(-1, 2 * PAGE_BYTES)
    words = memoryview(memory).cast("Q")
    torch.cuda.set_device(0)
    streams = [torch.cuda.Stream() for _ in range(18)]
    base, _keep = register(memory, 2 * PAGE_BYTES)
    flags, others = make_flags(base), make_flags(base + PAGE_BYTES)
    pinned = torch.zeros(8192, dtype=torch.int64, pin_memory=True)
    pinned_out = torch.zeros(8192, dtype=torch.int64, pin_memory=True)
    small, large = torch.zeros(8192, dtype=torch.int64, device="cuda"), torch.zeros(1 << 22, device="cuda")
    other, n = torch.zeros(1 << 22, device="cuda"), 512

    def kernel() -> None:
        large.add_(1.0)

    def to_device() -> None:
        small[:n].copy_(pinned[:n], non_blocking=True)

    def to_device_64k() -> None:
        small.copy_(pinned, non_blocking=True)

    def to_host() -> None:
        pinned_out[:n].copy_(small[:n], non_blocking=True)

    def on_device() -> None:
        other.copy_(large, non_blocking=True)

    def write_word() -> None:
        others.signal(Flag.LONG_STEP_QKV_READY)

    operations = [kernel, to_device, to_device_64k, to_host, on_device, write_word]
    for stream in streams:
        with torch.cuda.stream(stream):
            for each in operations:
                each()
            torch.cuda.Event().record()
    torch.cuda.synchronize()

    waits = {
        "queue waits": (Flag.LONG_STEP_QKV_READY, queued_word),
        "kernel waits": (Flag.ATTENTION_READY, polled_word),
    }
    for words_of in waits.values():  # loads both kernels
        words[words_of[1](0, words_of[0])] = 1
        with torch.cuda.stream(streams[0]):
            flags.wait(words_of[0])
        torch.cuda.synchronize()

    def captured(wait: str, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[0], capture_error_mode="thread_local"):
            flags.wait(waits[wait][0])
            kernel()
            run()
        return graph.replay

    def plain(wait: str, run: Callable[[], None]) -> Callable[[], None]:
        def enqueue() -> None:
            flags.wait(waits[wait][0])
            run()

        return enqueue

    def is_held_up(j: int, wait: str, first: Callable[[], None], second: Callable[[], None]) -> bool:
        flag, word = waits[wait]
        words[word(0, flag)] = 0
        with torch.cuda.stream(streams[0]):
            first()
        event = torch.cuda.Event()
        with torch.cuda.stream(streams[j]):
            second()
            event.record()
        deadline = time.perf_counter() + 0.004
        while not (is_done := event.query()) and time.perf_counter() < deadline:
            pass
        words[word(0, flag)] = 1
        torch.cuda.synchronize()
        return not is_done

    print(f"connections {os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS', 'default')}")
    for wait in waits:
        first = plain(wait, kernel)
        held = [j for j in range(1, 18) if is_held_up(j, wait, first, kernel)]
        print(f"{wait}, kernels: streams held up by stream 0: {held or 'none'}", flush=True)
        for make in (plain, captured):
            print(f"{wait}, {make.__name__}; rows: behind the wait of stream 0, columns: of streams 1 to 4; x: held up")
            print(" " * 14 + "".join(f"{each.__name__:>14}" for each in operations))
            for each in operations:
                try:
                    first = make(wait, each)
                except RuntimeError as error:
                    print(f"{each.__name__:>14} {error}"[:100])
                    continue
                cells = "".join(
                    f"{''.join('.x'[is_held_up(j, wait, first, second)] for j in (1, 2, 3, 4)):>14}"
                    for second in operations
                )
                print(f"{each.__name__:>14}{cells}", flush=True)


def make_weights() -> list[torch.Tensor]:
    sizes = ((HIDDEN, HIDDEN), (HIDDEN, 2 * MIDDLE), (MIDDLE, HIDDEN), (HIDDEN, QKV), (HIDDEN, VOCABULARY))
    return [torch.randn(a, b, dtype=torch.bfloat16, device="cuda") * 0.01 for a, b in sizes]


class Buffers:
    """Those of a lane's steps."""

    def __init__(self, rows: int) -> None:
        kind = {"dtype": torch.bfloat16, "device": "cuda"}
        self.attn, self.fetched = torch.randn(rows, HIDDEN, **kind), torch.empty(rows, HIDDEN, **kind)
        self.residual, self.qkv = torch.randn(rows, HIDDEN, **kind), torch.empty(rows, QKV, **kind)
        self.gated, self.hidden = torch.empty(rows, 2 * MIDDLE, **kind), torch.randn(rows, HIDDEN, **kind)
        self.logits = torch.empty(rows // 2, VOCABULARY, **kind)
        self.far_attn, self.far_qkv = self.attn, self.qkv

    def put_far(self) -> None:
        """The peer's memory lies on the second GPU."""
        self._kept = [torch.zeros_like(each, device="cuda:1") for each in (self.attn, self.qkv)]
        self.far_attn, self.far_qkv = (near_view(each) for each in self._kept)


def near_view(far: torch.Tensor) -> torch.Tensor:
    """Memory of the second GPU as a tensor of the first one, as in `CudaIpcChannel`."""
    device = torch.device("cuda", 0)
    storage = torch._C._construct_storage_from_data_pointer(far.data_ptr(), device, far.numel() * far.itemsize)
    return torch.empty(0, dtype=far.dtype, device=device).set_(storage, 0, far.shape, far.stride())


def copy_by_engine(target: torch.Tensor, source: torch.Tensor) -> None:
    from cuda.bindings import runtime

    from services.channel.cuda_flags import check

    kind, stream = runtime.cudaMemcpyKind.cudaMemcpyDefault, torch.cuda.current_stream().cuda_stream
    num_bytes = source.numel() * source.itemsize
    check(runtime.cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), num_bytes, kind, stream))


# How the rows come and go: by kernels, as in one GPU or from and to the peer; by copy engines.
FETCHES = {
    "near": lambda of: torch.mul(of.attn, 1.0, out=of.fetched),
    "kernel": lambda of: torch.mul(of.far_attn, 1.0, out=of.fetched),
    "engine": lambda of: copy_by_engine(of.fetched, of.far_attn),
}
PUTS = {
    "near": lambda of, qkv: torch.mm(of.hidden, qkv, out=of.qkv),
    "product": lambda of, qkv: torch.mm(of.hidden, qkv, out=of.far_qkv),
    "kernel": lambda of, qkv: torch.mul(torch.mm(of.hidden, qkv, out=of.qkv), 1.0, out=of.far_qkv),
    "engine": lambda of, qkv: copy_by_engine(of.far_qkv, torch.mm(of.hidden, qkv, out=of.qkv)),
}


def run_stroke(weights: list[torch.Tensor], of: Buffers, fetch: str = "near", put: str = "near") -> None:
    o, gate_up, down, qkv, _ = weights
    FETCHES[fetch](of)
    torch.mm(of.fetched, o, out=of.residual)
    torch.mm(of.residual, gate_up, out=of.gated)
    torch.mm(of.gated[:, :MIDDLE], down, out=of.hidden)
    PUTS[put](of, qkv)


def time_ms(run: Callable[[], None], num: int = 5) -> float:
    times = []
    for _ in range(num):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        deadline = time.monotonic() + 1.0
        while not end.query():
            if time.monotonic() > deadline:
                raise TimeoutError("held up")
        times.append(begin.elapsed_time(end))
    return sorted(times)[num // 2]


def probe_products(arguments: argparse.Namespace) -> None:
    """A stroke of several numbers of rows: alone, and beside a stream that waits."""
    from services.channel import Flag

    memory = mmap.mmap(-1, PAGE_BYTES)
    words = memoryview(memory).cast("Q")
    torch.cuda.set_device(0)
    streams = [torch.cuda.Stream() for _ in range(3)]
    base, _keep = register(memory, PAGE_BYTES)
    flags, weights = make_flags(base), make_weights()
    for rows in (128, 256, 436, 512, 708, arguments.rows, 1024):
        of = Buffers(rows)
        with torch.cuda.stream(streams[1]):
            run_stroke(weights, of)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=streams[1], capture_error_mode="thread_local"):
                for _ in range(NUM_LAYERS):
                    run_stroke(weights, of)
            graph.replay()
            texts = [f"alone {time_ms(graph.replay) * 1e3 / NUM_LAYERS:.0f}"]
        for name, flag, word in (
            ("queue waits", Flag.LONG_STEP_QKV_READY, queued_word),
            ("kernel waits", Flag.ATTENTION_READY, polled_word),
        ):
            words[word(0, flag)] = 0
            with torch.cuda.stream(streams[0]):
                flags.wait(flag)
            try:
                with torch.cuda.stream(streams[1]):
                    texts.append(f"{name} {time_ms(graph.replay) * 1e3 / NUM_LAYERS:.0f}")
            except TimeoutError as error:
                texts.append(f"{name} {error}")
            words[word(0, flag)] = 1
            torch.cuda.synchronize()
        print(f"a stroke of {rows} rows, us: {', '.join(texts)}", flush=True)


class Lane:
    """Steps that are launched one ahead, as in the workers."""

    def __init__(self, stream: torch.cuda.Stream, launch: Callable[[], None]) -> None:
        self.stream = stream
        self._launch = launch
        self.ends: list[torch.cuda.Event] = []

    def launch(self) -> None:
        with torch.cuda.stream(self.stream):
            self._launch()
            event = torch.cuda.Event()
            event.record()
        self.ends.append(event)


def period_ms(lanes: list[Lane], num_steps: int = 12, timeout_s: float = 8.0) -> float:
    """Milliseconds for a step of each lane, with the next one of a lane launched while one runs."""
    for lane in lanes:
        lane.ends.clear()
        lane.launch()
    begin_s, deadline = time.perf_counter(), time.monotonic() + timeout_s
    for step in range(num_steps + 3):
        if step == 3:
            begin_s = time.perf_counter()
        for lane in lanes:
            lane.launch()
            while not lane.ends[step].query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"step {step} has not ended")
    elapsed_s = time.perf_counter() - begin_s
    for lane in lanes:
        lane.stream.synchronize()
    return elapsed_s / num_steps * 1e3


def probe_dense(arguments: argparse.Namespace) -> None:
    """Steps of a dense worker, whose input and tokens come and go as in the product."""
    from cuda.bindings import runtime

    from services.channel import Flag
    from services.channel.cuda_flags import check

    rows, service_us = arguments.rows, arguments.peer_us or 350
    peer = Peer(
        2,
        lambda lane: queued_word(lane, Flag.LONG_STEP_QKV_READY),
        lambda lane: [queued_word(lane, Flag.ATTENTION_READY), polled_word(lane, Flag.ATTENTION_READY)],
    )
    try:
        torch.cuda.set_device(0)
        streams = [torch.cuda.Stream() for _ in range(2)]
        base, _keep = register(peer.memory, 2 * PAGE_BYTES)
        weights, flags = make_weights(), [make_flags(base + lane * PAGE_BYTES) for lane in range(2)]
        buffers = [Buffers(rows) for _ in range(2)]
        peer.set_service(service_us)
        is_far = arguments.part == "far"
        if is_far:
            check(runtime.cudaDeviceEnablePeerAccess(1, 0))
            for each in buffers:
                each.put_far()
            torch.cuda.synchronize(1)

        def make_graph(
            lane: int, stream: torch.cuda.Stream, waits: str, fetch: str, put: str
        ) -> torch.cuda.CUDAGraph:
            of = buffers[lane]

            def wait() -> None:
                if waits == "kernel":
                    flags[lane].wait(Flag.ATTENTION_READY)
                else:
                    flags[lane]._queued.wait(Flag.ATTENTION_READY)

            with torch.cuda.stream(stream):
                run_stroke(weights, of, fetch, put)
                torch.mm(of.hidden[: rows // 2], weights[4], out=of.logits)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    PUTS[put](of, weights[3])
                    flags[lane].signal(Flag.LONG_STEP_QKV_READY)
                    for layer in range(NUM_LAYERS):
                        wait()
                        run_stroke(weights, of, fetch, put)
                        if layer < NUM_LAYERS - 1:
                            flags[lane].signal(Flag.LONG_STEP_QKV_READY)
                    torch.mm(of.hidden[: rows // 2], weights[4], out=of.logits)
            return graph

        def make_lane(lane: int, stream: torch.cuda.Stream, waits: str, fetch: str, put: str) -> Lane:
            graph, of, num = make_graph(lane, stream, waits, fetch, put), buffers[lane], rows // 2
            inputs = torch.zeros(3 * rows, dtype=torch.int64, device="cuda")
            last = torch.zeros(1024, dtype=torch.int64, device="cuda")
            stage, slots = (torch.zeros(n, dtype=torch.int64, pin_memory=True) for n in (3 * rows, num))
            slots.copy_(torch.arange(num))
            host = torch.zeros(num, dtype=torch.int64, pin_memory=True)
            def launch() -> None:
                inputs.copy_(stage, non_blocking=True)
                graph.replay()
                token_ids = torch.argmax(of.logits, dim=-1)
                last[slots.to("cuda", non_blocking=True)] = token_ids
                host.copy_(token_ids, non_blocking=True)

            with torch.cuda.stream(stream):
                torch.argmax(of.logits, dim=-1)
                last[slots.to("cuda")] = 0
            torch.cuda.synchronize()
            return Lane(stream, launch)

        stroke = Buffers(rows)
        torch.cuda.synchronize()
        dense_ms = time_ms(lambda: [run_stroke(weights, stroke) for _ in range(NUM_LAYERS)])
        peer_ms = NUM_LAYERS * service_us / 1e3
        print(f"connections {os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS', 'default')}; {rows} rows")
        print(f"{dense_ms:.1f} ms of strokes alone, {peer_ms:.1f} of the peer; a step of each of two lanes:"
              f" {2 * dense_ms:.1f} if they overlap, {2 * (dense_ms + peer_ms):.1f} if not")
        ways = [("near", "near")]
        if is_far:
            for fetch, put in itertools.product(FETCHES, PUTS):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(streams[0]):
                    run_stroke(weights, buffers[0], fetch, put)
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph, stream=streams[0], capture_error_mode="thread_local"):
                        for _ in range(NUM_LAYERS):
                            run_stroke(weights, buffers[0], fetch, put)
                    print(f"strokes alone, fetched by {fetch}, put by {put}: {time_ms(graph.replay):.1f} ms")
            ways += [("kernel", "product"), ("kernel", "kernel"), ("engine", "engine")]
        for (fetch, put), (num_lanes, waits) in itertools.product(ways, ((1, "kernel"), (2, "kernel"), (2, "queue"))):
            name = f"{num_lanes} lanes, fetched by {fetch}, put by {put}, {waits} waits"
            for word in range(2 * PAGE_BYTES // 8):
                peer.words[word] = 0
            try:
                lanes = [make_lane(lane, streams[lane], waits, fetch, put) for lane in range(num_lanes)]
                print(f"{name}: {period_ms(lanes):.1f} ms for a step of each lane", flush=True)
            except TimeoutError as error:
                print(f"{name}: {error}", flush=True)
                os._exit(1)
    finally:
        peer.stop()


PARTS = {
    "queues": probe_queues,
    "products": probe_products,
    "dense": probe_dense,
    "far": probe_dense,
}

if __name__ == "__main__":
    main()
