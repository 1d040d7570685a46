"""What is known of a worker from outside: its numbers in the metrics, those of its database, its totals at the end."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mailing import answering, at_once, fill, make_all_due, make_box
from worker_process import Setting, make_key, receiving

from fleet import as_owner
from postseal.outbound.worker import Worker
from postseal.postgres.access import Access
from postseal.rules.delivery import Attempted, Code
from postseal.senders import Sender
from postseal.service import Service, running_service
from postseal.settings import Settings
from postseal.worker_service import running_worker
from until import until_async

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(access: Access, folder: Path, sender: Sender) -> AsyncGenerator[tuple[Service, Worker]]:
    """A service with a worker beside it, whose numbers it shows."""
    settings = Settings(
        database_url=access.owner,
        roles_file=str(access.passfile),
        deployment_key_file=str(make_key(folder)),
        signing_keys_dir=str(folder),
        poll_s=0.02,
    )
    async with (
        running_worker(settings, access, sender=sender) as delivery,
        running_service(settings, access, sealed=delivery.worker.wake) as service,
    ):
        service.sampler.watch(delivery.worker, delivery.database)
        yield service, delivery.worker


def shown(service: Service, name: str, **labels: str) -> float | None:
    """One series, as a scrape has it now."""
    service.sampler.sample()
    return service.metrics.exposed().get_sample_value(f"postseal_{name}", labels)


async def test_what_a_worker_does_is_counted(access: Access, tmp_path: Path):
    """Each delivery by what came of it, each turn, and how many are out: once each, however often it is sampled."""
    gate = asyncio.Event()
    box, failing = make_box(access), make_box(access, "failing")
    fill(access, failing, 2, stage="retry", limit=2)
    fill(access, failing, 3)
    sender = answering(Attempted(Code.STATUS_5XX))
    async with serving(access, tmp_path, sender) as (service, worker):
        await until_async(lambda: worker.totals.retried + worker.totals.dead == 5 and worker.out == 0)
        for _ in range(2):
            assert shown(service, "deliveries_total", became="dead") == 2
            assert shown(service, "deliveries_total", became="retried") == 3
        assert shown(service, "turns_total") == worker.turns >= 1
        assert [shown(service, "turns_lost_total", why=why) for why in ("limited", "failed", "cut_off")] == [0, 0, 0]
        sender.answer = at_once().answer
        make_all_due(access)
        await until_async(lambda: worker.totals.delivered == 3)
        assert shown(service, "deliveries_total", became="delivered") == 3
        await until_async(lambda: worker.out == 0)

        async def wait(_mail: object) -> Attempted:
            await gate.wait()
            return Attempted()

        sender.answer = wait
        fill(access, box, 4)
        await until_async(lambda: worker.out == 4)
        assert shown(service, "deliveries_out") == 4
        assert (shown(service, "pool_connections", pool="worker", state="idle") or 0) > 0
        gate.set()
        await until_async(lambda: worker.out == 0)
        assert shown(service, "deliveries_out") == 0


async def test_what_is_to_be_sent_is_told(access: Access, tmp_path: Path):
    """Pending and held, what failed and was given up, what is due longest, and what was not sealed yet."""
    box, held, dead = make_box(access), make_box(access, "held"), make_box(access, "dead", tenant="globex")
    later = make_box(access, "later", tenant="globex")
    pulled = make_box(access, "device-01", mode="pull")
    fill(access, later, 3, due_in_s=3600)
    fill(access, box, 2, due_in_s=-120)
    fill(access, held, 4, due_in_s=-3600)
    fill(access, pulled, 5, due_in_s=-3600)
    fill(access, dead, 1, stage="retry", limit=1, due_in_s=-60)
    with as_owner(access) as owner:
        owner.execute(
            "UPDATE destinations SET disabled_at = now(), disabled_reason = 'operator' WHERE stream = %s", [held.stream]
        )
        owner.execute("UPDATE queue SET lane = 'held' WHERE stream = %s", [held.stream])
        owner.execute("UPDATE destination_health SET failing_since = now() WHERE stream = %s", [box.stream])
        owner.execute("UPDATE destination_health SET settled = 1 WHERE stream = %s", [dead.stream])
        owner.execute(
            "WITH gone AS (DELETE FROM queue WHERE stream = %s RETURNING *) INSERT INTO settlements"
            " SELECT tenant, stream, sequence, 'dead', 'status_5xx', 'apollo', 1, 1 FROM gone",
            [dead.stream],
        )
        owner.execute(
            "INSERT INTO intents (tenant, project, destination, idempotency_key, data, created_at, due_at)"
            " VALUES ('acme', 'apollo', 'erp', 'key:0001', '{}', now() - interval '30 s', now() + interval '1 h')"
        )
    settings = Settings(database_url=access.owner, roles_file=str(access.passfile), signing_keys_dir=str(tmp_path))
    async with running_service(settings, access) as service:
        await service.sampler.sample_backlog()
        assert shown(service, "pending_deliveries") == 3 + 2 + 4 + 5
        assert shown(service, "held_deliveries") == 4
        assert shown(service, "failing_destinations") == 1
        assert 120 <= (shown(service, "overdue_seconds") or 0) < 150
        assert shown(service, "dead_letters") == 1
        assert shown(service, "intents") == 1
        assert 30 <= (shown(service, "intent_age_seconds") or 0) < 60


async def test_nothing_to_be_sent(access: Access, tmp_path: Path):
    """An empty database is all zeroes, and so is one whose mail is due later."""
    fill(access, make_box(access), 3, due_in_s=3600)
    settings = Settings(database_url=access.owner, roles_file=str(access.passfile), signing_keys_dir=str(tmp_path))
    async with running_service(settings, access) as service:
        await service.sampler.sample_backlog()
        assert [shown(service, name) for name in ("overdue_seconds", "dead_letters", "intents")] == [0, 0, 0]


async def test_its_totals_at_the_end(access: Access, tmp_path: Path):
    """A worker has no port: its last lines tell what it did."""
    setting = Setting(access, tmp_path)
    make_key(tmp_path)
    async with receiving() as receiver:
        fill(access, make_box(access, url=receiver.url), 3)
        async with setting.worker() as process:
            await until_async(lambda: receiver.answered.total() == 3)
            process.terminate()
            assert process.stderr is not None
            lines = [json.loads(line) for line in (await process.stderr.read()).splitlines()]
    [told] = [line for line in lines if line["event"] == "worker_stopped"]
    assert (told["delivered"], told["claimed"], told["dead"]) == (3, 3, 0)
    assert told["turns"] >= 1
