"""`live_view`: what a person sees at a terminal while a load runs: a bar, requests in flight, rates and latency."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator

from bench.load.load import Progress
from bench.load.stats import NS_PER_MS


@contextlib.contextmanager
def live_view(title: str, num_requests: int) -> Iterator[Callable[[Progress], object] | None]:
    """Yields what shows the progress on standard error; None if that is no terminal. The bar stays when it is done."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    shape = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining} {postfix}"
    with tqdm(desc=title, total=num_requests, bar_format=shape, dynamic_ncols=True) as bar:
        before, before_s = Progress(), time.monotonic()

        def show(progress: Progress) -> None:
            nonlocal before, before_s
            now_s = time.monotonic()
            text = describe(progress, before, now_s - before_s)
            before, before_s = dataclasses.replace(progress), now_s
            bar.set_postfix_str(text, refresh=False)
            bar.update(progress.num_ended - bar.n)
            bar.refresh()

        yield show


def describe(progress: Progress, before: Progress, seconds: float) -> str:
    """Requests in flight now; rate and latency since `before`, which was `seconds` ago."""
    parts = [f"{progress.num_sent - progress.num_ended} in flight"]
    if seconds > 0:
        parts.append(f"{(progress.num_tokens - before.num_tokens) / seconds:,.0f} tokens/s")
    num_first = progress.num_first_chunks - before.num_first_chunks
    if num_first:
        parts.append(f"TTFT {(progress.first_chunk_ns - before.first_chunk_ns) / num_first / NS_PER_MS:,.0f} ms")
    if progress.num_failed:
        parts.append(f"{progress.num_failed} failed")
    return ", ".join(parts)
