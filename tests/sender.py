"""A device at work: it sends one envelope after another, each until it is acknowledged, over whichever port answers."""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fleet import Device, stored
from postseal.postgres.access import Access

ENVELOPE = "application/vnd.controlplane.envelope.v1+json"
ANSWER_S = 20.0
HEALED_S = 30.0
"""How long an envelope may take to be acknowledged, retries included."""
PAUSE_S = 0.02
FIRST_S = 30.0


class Sender(threading.Thread):
    """Sends until it is told to stop. `acknowledged` has the outcomes by sequence, `retried` why one was sent again."""

    def __init__(self, device: Device, ports: Sequence[int]) -> None:
        super().__init__()
        self.device = device
        self.acknowledged: dict[int, str] = {}
        self.retried: Counter[str] = Counter()
        self.fault: str | None = None
        self._ports = list(ports)
        self._told = threading.Event()
        self._begun = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        """One envelope after another."""
        sequence = 0
        while not self._told.is_set() and self.fault is None:
            sequence += 1
            outcome = self._send(self.device.envelope(sequence))
            if outcome is not None:
                self.acknowledged[sequence] = outcome
            self._begun.set()
        self._close()

    def wait_for_first(self) -> None:
        """Until the first envelope has its answer."""
        assert self._begun.wait(FIRST_S)

    def stop(self) -> None:
        """Once the envelope under way is acknowledged."""
        self._told.set()
        self.join()

    def _send(self, body: bytes) -> str | None:
        give_up_s = time.monotonic() + HEALED_S
        while time.monotonic() < give_up_s:
            try:
                status, document = self._exchange(body)
            except (OSError, http.client.HTTPException) as error:
                why = type(error).__name__
                self._ports.append(self._ports.pop(0))
            else:
                if status in (200, 201):
                    return document["outcome"]
                why = document["reason"]
                if not document["retryable"]:
                    self.fault = f"refused: {why}"
                    return None
            self.retried[why] += 1
            self._close()
            time.sleep(PAUSE_S)
        self.fault = f"not acknowledged within {HEALED_S:g} s: {dict(self.retried)}"
        return None

    def _exchange(self, body: bytes) -> tuple[int, dict[str, str]]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._ports[0], timeout=ANSWER_S)
        fields = {"Authorization": f"Bearer {self.device.token.reveal()}", "Content-Type": ENVELOPE}
        self._connection.request("POST", "/v1/envelopes", body, fields)
        with self._connection.getresponse() as answer:
            return answer.status, json.loads(answer.read())

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextmanager
def sending(devices: Sequence[Device], *ports: int) -> Iterator[list[Sender]]:
    """One sender a device, from everybody's first acknowledgement on; at the end none has a fault."""
    senders = [Sender(device, ports) for device in devices]
    for sender in senders:
        sender.start()
    try:
        for sender in senders:
            sender.wait_for_first()
        yield senders
    finally:
        for sender in senders:
            sender.stop()
    assert [sender.fault for sender in senders if sender.fault] == []


def require_each_once(access: Access, senders: Sequence[Sender]) -> None:
    """Every envelope was acknowledged, is retained with its payload, and was taken as new exactly once."""
    for sender in senders:
        kept, last = stored(access, sender.device), len(sender.acknowledged)
        assert kept.cursor == (0, last, last)
        assert kept.sequences.keys() == kept.payloads == sender.acknowledged.keys() == set(range(1, last + 1))
    new = [outcome for outcome, _ in stored(access, senders[0].device).audits if outcome == "accepted"]
    assert len(new) == sum(len(sender.acknowledged) for sender in senders)
