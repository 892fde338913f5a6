"""The other end of a channel, as a process of its own: `python -m tests.gpu.channel_peer DEVICE`.

It reads one command per line from standard input and prints one line in reply. As the attention worker it computes
`attn_out` from `qkv` with `answer_to`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from services.channel import Channel, ChannelSpec, Flag
from services.channel.factory import map_channel
from services.common.errors import TwostrokeError

SPEC = ChannelSpec(max_tokens=1024, qkv_size=768, attn_size=256, dtype=torch.bfloat16)
WAIT_TIMEOUT_S = 60.0  # of waits on a CPU
MAPPED, DONE = "mapped", "done"


def answer_to(qkv: torch.Tensor, out: torch.Tensor) -> None:
    """qkv: [max_tokens, qkv_size] -> out [max_tokens, attn_size]"""
    torch.add(qkv[:, : SPEC.attn_size], qkv[:, -SPEC.attn_size :], out=out)


def answer(channel: Channel, question_ready: Flag) -> None:
    """One round: enqueued on a GPU, run at once on a CPU."""
    channel.wait(question_ready)
    answer_to(channel.qkv, channel.attn_out)
    channel.signal(Flag.ATTENTION_READY)


def give_back(channel: Channel, num_rounds: int, num_tokens: int) -> None:
    """In each round, fetches rows of `attn_out` as the dense worker does, and copies them into `qkv`."""
    channel.begin_layers(num_tokens)
    for _ in range(num_rounds):
        channel.wait(Flag.ATTENTION_READY)
        channel.qkv[:num_tokens, : SPEC.attn_size] = channel.fetch_attn_out(num_tokens)
        channel.signal(Flag.QKV_READY)


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device and a new stream current, as both workers do."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


class Peer:
    """Carries out commands on one mapped channel at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._channel: Channel | None = None

    def run_command(self, command: str, *arguments: str) -> str:
        """Carries out a command. Returns the reply."""
        if command == "map":
            return self._map(*arguments)
        channel = self._channel
        assert channel is not None, "no channel is mapped"
        if command == "answer":
            for _ in range(int(arguments[0])):
                answer(channel, Flag[arguments[1]])
        elif command == "replay":
            replay = self._capture(lambda: answer(channel, Flag[arguments[1]]))
            for _ in range(int(arguments[0])):
                replay()
        elif command == "return":
            num_rounds, num_tokens = map(int, arguments)
            self._capture(lambda: give_back(channel, num_rounds, num_tokens))()
        elif command == "copies":
            return str(channel.fetch_attn_out(int(arguments[0])).data_ptr() != channel.attn_out.data_ptr())
        elif command == "count_errors":
            return str(channel.num_errors)
        elif command == "abort":
            channel.abort()
        elif command == "close":
            channel.close()
            self._channel = None
        else:
            raise ValueError(command)
        if self._device.type == "cuda" and self._channel is not None:
            torch.cuda.current_stream(self._device).synchronize()
        return DONE

    def _capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """A function that replays the captured graph; on a CPU, the function itself."""
        if self._device.type == "cpu":
            return function
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self._device)):
            function()
        return graph.replay

    def wait_for_ever(self) -> None:
        """Waits for a flag that is never set."""
        assert self._channel is not None, "no channel is mapped"
        self._channel.wait(Flag.QKV_READY)

    def _map(self, kind: str, handle: str, epoch: str, attachment_id: str) -> str:
        device = self._device
        try:
            self._channel = map_channel(
                device, kind, handle.encode(), SPEC, int(epoch), int(attachment_id), WAIT_TIMEOUT_S
            )
        except TwostrokeError as error:
            return f"{type(error).__name__}: {error}"
        return f"{MAPPED} on {self._channel.qkv.device}"


def main() -> None:
    device = torch.device(sys.argv[1])
    peer = Peer(device)
    with own_stream(device):
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "wait_for_ever":
                print(DONE, flush=True)  # printed first, because the next line does not return
                peer.wait_for_ever()
            else:
                print(peer.run_command(command, *arguments), flush=True)


if __name__ == "__main__":
    main()
