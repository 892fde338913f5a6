"""`Attachment`: all state that lives as long as one dense worker is attached. A new attachment gets a new object."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from services.attn_worker.runner.layer_runner import RunningStep
from services.channel import Channel
from services.channel.message_link import LinkOffer, MessageLink
from services.common.errors import PeerError
from services.rpc.watchdog import Progress
from services.step import StepPlan


class Attachment:
    """Created on the event loop. From `AttentionEngine.attach` on the engine thread owns it and closes it."""

    def __init__(self, attachment_id: int, channels: Mapping[int, Channel], max_num_tokens: int) -> None:
        self.attachment_id = attachment_id
        self.channels = channels  # by lane
        self.max_num_tokens = max_num_tokens  # maximum of a step, in each lane
        self.running: deque[tuple[RunningStep, StepPlan]] = deque()  # oldest first
        # Steps that may use blocks which have become free since: a later one, which may take them, comes after these.
        self.before_reuse: tuple[RunningStep, ...] = ()
        self.launching: StepPlan | None = None  # the plan whose layers are being run or launched
        self.request_ids: dict[int, str] = {}  # of sequences opened in this attachment, for messages
        self.offer: LinkOffer | None = None  # of a link for plans; None: they come by gRPC alone
        self._link: MessageLink | None = None  # once the dense worker has connected
        # Gets the error of a step that fails between calls, which ends the attachment.
        self.fail: Callable[[Exception], None] = lambda error: None

    def accept_link(self, max_message_bytes: int) -> MessageLink:
        """The link to the dense worker, which has connected to the offer. Raises `PeerError` if it has not."""
        if self.offer is None:
            raise PeerError(f"attachment {self.attachment_id} offers no link for plans, or its link is in use")
        offer, self.offer = self.offer, None
        self._link = offer.accept(max_message_bytes)
        return self._link

    def progress(self, num_steps: int, num_layers: int) -> Progress | None:
        """The progress of the running step, or None without one. May be called from any thread."""
        plan = self.launching
        if plan is None:
            return None
        channel = self.channels[plan.lane]
        num_waits = [each.num_waits or 0 for each in self.channels.values()]
        return Progress(
            counter=(self.attachment_id, num_steps, plan.step_id, *num_waits),
            step_id=plan.step_id,
            layer=None if channel.num_waits is None else channel.num_waits % num_layers,
            request_ids=tuple(self.request_ids.get(seq_id, f"{seq_id:x}") for seq_id in plan.entries.seq_ids.tolist()),
            waits_for="dense_worker" if channel.is_waiting else "",
        )

    def drop_steps(self) -> None:
        """Forgets all steps that have not ended."""
        for running, _ in self.running:
            running.drop()
        self.running.clear()
        self.before_reuse, self.launching = (), None

    def abort(self) -> None:
        """Releases all waits in the channels and of the link, for good. May be called from any thread."""
        for channel in self.channels.values():
            channel.abort()
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """Unmaps and removes all data regions; they must not be used afterwards."""
        if self.offer is not None:
            self.offer.close()
        if self._link is not None:
            self._link.close()
        for channel in self.channels.values():
            channel.close()
