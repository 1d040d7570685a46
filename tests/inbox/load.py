"""Run as a program: one service under load, which tells each acknowledgement on stdout the moment it has it.

Standard input holds one JSON document: how to reach the database, and for each device its credential and envelopes.
A line `device number, envelope number, outcome` follows for each acknowledged envelope. What is `unavailable` is sent
again until it is acknowledged; with all of it acknowledged the program ends with exit code 0.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from postseal import logs
from postseal.errors import Unavailable
from postseal.inbound.inbox import Inbound
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt

LINES = 7
"""Envelopes a request; a device has two requests under way, so that some arrive out of order."""
TRIES = 300
PAUSE_S = 0.05


async def main(plan: dict[str, Any]) -> None:
    """Send all of it, every device at once."""
    logs.configure("error")  # to stderr: standard output is for acknowledgements
    access = Access(plan["owner"], Path(plan["passfile"]), "postseal")
    async with running_service(Settings(window=8192, sync_burst=10**9), access) as service:
        await asyncio.gather(*(_send_all(service, number, device) for number, device in enumerate(plan["devices"])))


async def _send_all(service: Service, number: int, device: dict[str, Any]) -> None:
    envelopes: list[str] = device["envelopes"]
    numbered = list(enumerate(envelopes))
    chunks = iter([numbered[start : start + LINES] for start in range(0, len(numbered), LINES)])

    async def one_after_another() -> None:
        for chunk in chunks:
            await _send(service, number, device["credential"], chunk)

    await asyncio.gather(one_after_another(), one_after_another())


async def _send(service: Service, number: int, credential: str, chunk: list[tuple[int, str]]) -> None:
    for _ in range(TRIES):
        body = "\n".join(envelope for _, envelope in chunk).encode()
        try:
            caller = await service.door.identify("192.0.2.7", credential)
            verdicts = await service.inbox.receive_batch(Inbound(caller, body))
        except Unavailable:
            verdicts = []
        assert isinstance(verdicts, list)
        again = chunk[len(verdicts) :]
        for (index, envelope), verdict in zip(chunk, verdicts, strict=False):
            if isinstance(verdict, Receipt):
                os.write(1, f"{number} {index} {verdict.outcome}\n".encode())
            else:
                assert verdict.reason is Reason.UNAVAILABLE, verdict.reason
                again.append((index, envelope))
        if not again:
            return
        chunk = again
        await asyncio.sleep(PAUSE_S)
    raise AssertionError("the database did not come back")


if __name__ == "__main__":
    asyncio.run(main(json.load(sys.stdin)))
