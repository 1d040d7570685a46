"""`postseal worker` as a process: frozen past its lease, killed in each phase, stopped, and run once."""

import asyncio
import json
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mailing import Box, fill, make_all_due, make_box, stages

from fleet import as_owner
from postseal.postgres.access import Access
from until import until_async, waits_for_lock

pytestmark = pytest.mark.anyio

POSTSEAL = Path(sys.executable).with_name("postseal")
READY_WITHIN_S = 60.0
DONE_WITHIN_S = 60.0


@dataclass
class Receiver:
    """A server on loopback that answers 204 while its gate is open, and keeps the others waiting."""

    url: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: Counter[str] = field(default_factory=Counter[str])
    """How often each delivery came in, by its id."""
    answered: Counter[str] = field(default_factory=Counter[str])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
                await reader.readexactly(int(headers["content-length"]))
                delivery = headers["webhook-id"]
                self.asked[delivery] += 1
                await self.gate.wait()
                self.answered[delivery] += 1
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def receiving() -> AsyncGenerator[Receiver]:
    """A receiver, open."""
    receiver = Receiver()
    receiver.gate.set()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.close()


@dataclass
class Setting:
    """Where the workers of one test work."""

    access: Access
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Their settings: short waits, loopback allowed."""
        return os.environ | {
            "POSTSEAL_DATABASE_URL": self.access.owner,
            "POSTSEAL_ROLES_FILE": str(self.access.passfile),
            "POSTSEAL_DATA_DIR": str(self.folder),
            "POSTSEAL_DEPLOYMENT_KEY_FILE": str(self.folder / "deployment.key"),
            "POSTSEAL_ALLOW_HTTP": "true",
            "POSTSEAL_ALLOWED_CIDRS": "127.0.0.0/8",
            "POSTSEAL_POLL_S": "0.05",
            "POSTSEAL_LEASE_S": "30",
            "POSTSEAL_STOP_GRACE_S": "5",
        }

    @asynccontextmanager
    async def worker(self, *arguments: str) -> AsyncGenerator[Process]:
        """A worker, ready to deliver; killed at the end if it still runs."""
        process = await asyncio.create_subprocess_exec(
            POSTSEAL, "worker", "--json", *arguments, env=self.environment, stdout=PIPE, stderr=PIPE
        )
        try:
            if not arguments:
                assert process.stdout is not None
                async with asyncio.timeout(READY_WITHIN_S):
                    assert json.loads(await process.stdout.readline()) == {"delivering": True}
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.communicate()

    async def once(self) -> dict[str, Any]:
        """What one turn reports."""
        async with self.worker("--once") as process:
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return json.loads(out)


@pytest.fixture
def setting(access: Access, tmp_path: Path) -> Setting:
    """A deployment's folder and key."""
    key = tmp_path / "deployment.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    return Setting(access, tmp_path)


def settlements(access: Access) -> list[tuple[str, int]]:
    """State and attempt of all that was settled."""
    with as_owner(access) as owner:
        return owner.execute("SELECT state, attempt FROM settlements ORDER BY sequence").fetchall()


async def stop(process: Process) -> None:
    """Stop it as an operator does; it ends well."""
    process.terminate()
    async with asyncio.timeout(DONE_WITHIN_S):
        assert await process.wait() == 0


async def test_a_worker_that_freezes_past_its_lease(setting: Setting):
    """Another one delivers meanwhile; when the frozen one wakes up, what it has to say changes nothing."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker() as frozen:
            await until_async(lambda: len(receiver.asked) == 3)
            frozen.send_signal(signal.SIGSTOP)
            receiver.gate.set()
            await until_async(lambda: len(receiver.answered) == 3)
            make_all_due(setting.access)
            async with setting.worker() as other:
                await until_async(lambda: stages(setting.access, box) == {"delivered": 3})
                before = settlements(setting.access)
                frozen.send_signal(signal.SIGCONT)
                await stop(other)
            await stop(frozen)
    assert settlements(setting.access) == before == [("delivered", 2)] * 3
    assert set(receiver.answered.values()) == {2}


async def test_a_worker_that_freezes_and_finds_its_leases_untouched(setting: Setting):
    """Its pairs still match: what was delivered is settled, though the leases were over."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker() as frozen:
            await until_async(lambda: len(receiver.asked) == 3)
            frozen.send_signal(signal.SIGSTOP)
            receiver.gate.set()
            await until_async(lambda: len(receiver.answered) == 3)
            with as_owner(setting.access) as owner:
                owner.execute("UPDATE queue SET due_at = clock_timestamp() + interval '2 s'")
            frozen.send_signal(signal.SIGCONT)
            await until_async(lambda: stages(setting.access, box) == {"delivered": 3})
            await stop(frozen)
    assert settlements(setting.access) == [("delivered", 1)] * 3


async def test_killed_while_it_sends(setting: Setting):
    """The receiver had it in hand: the lease brings it back, and it is delivered again under the same id."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker() as killed:
            await until_async(lambda: len(receiver.asked) == 3)
            killed.kill()
            await killed.wait()
        assert stages(setting.access, box) == {"leased": 3}
        receiver.gate.set()
        make_all_due(setting.access)
        report = await setting.once()
    assert (report["tenant"], report["delivered"]) == ("acme", 3)
    assert settlements(setting.access) == [("delivered", 2)] * 3
    assert len(receiver.asked) == 3


async def test_killed_while_it_settles(setting: Setting):
    """The transaction of the settlement is gone with it: the receiver gets all of it twice, and removes duplicates."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        with as_owner(setting.access) as owner:
            with owner.transaction():
                owner.execute("SELECT FROM destination_health FOR UPDATE")
                async with setting.worker() as killed:
                    await until_async(lambda: len(receiver.answered) == 3)
                    await until_async(lambda: waits_for_lock(setting.access))
                    killed.kill()
                    await killed.wait()
            await until_async(lambda: not waits_for_lock(setting.access))
        # Its session may have gone on to the commit when it had the lock: either way nothing is lost.
        left = stages(setting.access, box)
        assert left in ({"leased": 3}, {"delivered": 3})
        if left == {"leased": 3}:
            make_all_due(setting.access)
            await setting.once()
    assert {state for state, _ in settlements(setting.access)} == {"delivered"}
    assert len(settlements(setting.access)) == 3


async def kill_round(setting: Setting, receiver: Receiver, boxes: list[Box], chance: random.Random) -> None:
    """Kill a worker at a random moment of its work."""
    for box in boxes:
        fill(setting.access, box, 60)
    async with setting.worker() as killed:
        await until_async(lambda: bool(receiver.asked))
        await asyncio.sleep(chance.uniform(0, 0.25))
        killed.kill()
        await killed.wait()


async def kill_rounds(setting: Setting, chance: random.Random, rounds: int) -> None:
    """Kill one worker after the other; then all is delivered, nothing is settled twice, nothing is lost."""
    async with receiving() as receiver:
        boxes = [make_box(setting.access, name, url=receiver.url) for name in ("erp", "crm", "hr")]
        for _ in range(rounds):
            receiver.asked.clear()
            await kill_round(setting, receiver, boxes, chance)
            make_all_due(setting.access)
        total = rounds * 60 * len(boxes)
        async with setting.worker() as last:
            await until_async(lambda: stages(setting.access, *boxes) == {"delivered": total}, within_s=DONE_WITHIN_S)
            await stop(last)
    with as_owner(setting.access) as owner:
        ids = owner.execute("SELECT delivery::text FROM deliveries").fetchall()
        pending = owner.execute(
            "SELECT sum(highest - settled) FROM destinations JOIN destination_health USING (tenant, stream)"
        ).fetchone()
    assert {delivery for (delivery,) in ids} == receiver.answered.keys()
    assert pending == (0,)
    attempts = Counter(attempt for _, attempt in settlements(setting.access))
    print(f"{total} delivered, by attempt: {dict(attempts)}; received again: {receiver.answered.total() - total}")


async def test_killed_at_random_moments(setting: Setting, seed: int):
    """Three times."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    await kill_rounds(setting, random.Random(seed), 3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_killed_at_random_moments_often(setting: Setting, seed: int):
    """A hundred times."""
    print(f"POSTSEAL_TEST_SEED={seed}")
    await kill_rounds(setting, random.Random(seed), 100)


async def test_stopped_while_it_sends(setting: Setting):
    """SIGTERM: what is on its way comes to its end, nothing more is begun, nothing stays out."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 40)
        receiver.gate.clear()
        async with setting.worker() as process:
            await until_async(lambda: len(receiver.asked) == 16)
            process.terminate()
            await asyncio.sleep(0.3)
            assert process.returncode is None
            receiver.gate.set()
            async with asyncio.timeout(DONE_WITHIN_S):
                assert await process.wait() == 0
    assert stages(setting.access, box) == {"delivered": 16, "fresh": 24}


async def test_a_second_signal_ends_it_at_once(setting: Setting):
    """Its leases bring back what it had."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker() as process:
            await until_async(lambda: len(receiver.asked) == 3)
            process.terminate()
            await asyncio.sleep(0.2)
            process.terminate()
            async with asyncio.timeout(3):
                assert await process.wait() == 143
    assert stages(setting.access, box) == {"leased": 3}


async def test_one_turn(setting: Setting):
    """`--once` uses one tenant's turn and reports it; with nothing due it says so."""
    async with receiving() as receiver:
        acme = make_box(setting.access, tenant="acme", url=receiver.url)
        globex = make_box(setting.access, tenant="globex", url=receiver.url)
        fill(setting.access, acme, 20)
        fill(setting.access, globex, 2)
        report = await setting.once()
        assert stages(setting.access, acme) == {"delivered": 16, "fresh": 4}
        assert stages(setting.access, globex) == {"fresh": 2}
        assert report.pop("seconds") > 0
        assert report == {
            "tenant": "acme",
            "claimed": 16,
            "ended": 0,
            "delivered": 16,
            "retried": 0,
            "dead": 0,
            "released": 0,
            "fenced": 0,
            "left": 0,
            "limited": 0,
            "renewed": 0,
        }
        for _ in range(2):
            await setting.once()
        assert stages(setting.access, acme, globex) == {"delivered": 22}
        assert (await setting.once())["tenant"] is None


async def test_one_turn_that_is_stopped(setting: Setting):
    """It hands back what it has."""
    async with receiving() as receiver:
        box = make_box(setting.access, url=receiver.url)
        fill(setting.access, box, 3)
        receiver.gate.clear()
        async with setting.worker("--once") as process:
            await until_async(lambda: len(receiver.asked) == 3, within_s=READY_WITHIN_S)
            process.terminate()
            async with asyncio.timeout(DONE_WITHIN_S):
                assert await process.wait() == 143
    assert stages(setting.access, box) == {"retry": 3}
