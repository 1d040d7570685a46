"""docs/composing.md: its program runs, and each part of a deployment's own does its work in it."""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest
import tables
from programs import line_of, of_deployment, program, running

from fleet import as_owner
from outgoing import Destination, decision, new_destination
from postseal.envelope import ed25519
from postseal.postgres.access import Access

CREDENTIAL = "a credential of the partner's"
WAIT_FOR_ROW = """
DO $$ BEGIN
    FOR n IN 1 .. 3000 LOOP
        PERFORM FROM settlements WHERE state = 'delivered';
        EXIT WHEN FOUND;
        PERFORM pg_sleep(0.01);
    END LOOP;
END $$
"""


def queue_one(destination: Destination) -> None:
    """Let something be due for a destination."""
    place = [destination.tenant, destination.stream]
    with as_owner(destination.access) as owner:
        owner.execute("UPDATE destinations SET highest = 1 WHERE tenant = %s AND stream = %s", place)
        owner.execute(
            "INSERT INTO deliveries VALUES (%s, %s, 1, gen_random_uuid(), gen_random_uuid(), 'key:0001', sha256(''),"
            " sha256(''), repeat('k', 43), now())",
            place,
        )
        owner.execute("INSERT INTO payloads VALUES (%s, %s, 1, NULL, '', '')", place)
        owner.execute(
            "INSERT INTO queue (tenant, stream, sequence, lane, due_at, attempt_limit)"
            " VALUES (%s, %s, 1, 'push', now(), 8)",
            place,
        )


def post(address: str, credential: str) -> dict[str, str]:
    """One delivery for `orders`."""
    data = decision()
    body = {"destination": "orders", "kind": data["kind"], "data": data}
    headers = {
        "Authorization": f"Bearer {credential}",
        "Content-Type": "application/json",
        "Idempotency-Key": str(uuid4()),
    }
    request = urllib.request.Request(  # noqa: S310 - to the program of this test
        f"{address}/v1/projects/apollo/deliveries", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - see above
        assert answer.status == 201
        return json.load(answer)


@pytest.mark.timeout(120)
def test_the_program(access: Access, tmp_path: Path):
    """Its verifier lets callers in, its keys sign, its scheduler leaves a tenant out, its sender gets the delivery."""
    url = "https://broker.internal/orders"
    orders, closed = new_destination(access, url=url), new_destination(access, tenant="globex", url=url)
    queue_one(closed)
    file, seed = program("composing.md", "own.py", tmp_path), ed25519.generate()
    environment = of_deployment(access, tmp_path) | {
        "PARTNER_CREDENTIAL": CREDENTIAL,
        "ACME_SEED": seed.hex(),
        "CLOSED": "globex,initech",
    }
    keyid = ed25519.thumbprint(ed25519.public_key(seed))
    with running([sys.executable, file, "register"], environment, tmp_path) as registering:
        assert line_of(registering) == f"registered {keyid}"
        assert registering.wait(60) == 0
    with running([sys.executable, file], environment, tmp_path) as service:
        address = line_of(service)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(address, "of somebody else")
        sealed = post(address, CREDENTIAL)
        word, subject, delivery, size = line_of(service).split()
        assert (word, subject, delivery) == ("published", url, sealed["delivery"])
        assert int(size) > 500
        with as_owner(access) as owner:
            owner.execute(WAIT_FOR_ROW)
        service.terminate()
        assert service.wait(60) == 0
    [row] = orders.rows()
    assert (str(row.delivery), row.keyid, row.lane) == (delivery, keyid, None)
    with as_owner(access) as owner:
        assert owner.execute("SELECT tenant, state FROM settlements").fetchall() == [("acme", "delivered")]
        assert owner.execute("SELECT tenant, stage FROM queue").fetchall() == [("globex", "fresh")]


def test_every_block_is_run():
    """No Python stands on the page that the test above leaves out."""
    page = (tables.DOCS / "composing.md").read_text()
    assert page.count("```python\n") == page.count("<!-- part: own.py -->\n```python\n")
