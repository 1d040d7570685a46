"""A kind of the deployment's own, from its file to the database."""

import json
from pathlib import Path
from typing import Any

import pytest

from fleet import Device, stored
from postseal.errors import StartupError
from postseal.outcomes import Outcome, Reason
from postseal.postgres.access import Access
from postseal.service import running_service
from postseal.settings import Settings
from postseal.verdicts import Receipt, Refusal

pytestmark = pytest.mark.anyio

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "additionalProperties": False,
    "required": ["kind", "note"],
    "properties": {"kind": {"const": "acme.note"}, "note": {"type": "string", "maxLength": 9}},
}
GOOD = {"kind": "acme.note", "note": "\u00fcber\n"}


def kinds_dir(folder: Path, schema: dict[str, Any]) -> Settings:
    """Settings with a folder of the one kind."""
    (folder / "acme.note.json").write_text(json.dumps(schema))
    return Settings(kinds_dir=str(folder))


async def test_it_is_received(access: Access, device: Device, tmp_path: Path):
    """Valid data is accepted and kept; data that its schema refuses is `payload_invalid` and audited."""
    async with running_service(kinds_dir(tmp_path, SCHEMA), access) as service:
        good = await service.inbox.receive(device.inbound(device.envelope(1, data=GOOD)))
        bad = await service.inbox.receive(device.inbound(device.envelope(2, data=GOOD | {"note": "0123456789"})))
        built_in = await service.inbox.receive(device.inbound(device.envelope(2)))
        assert list(service.kinds) == ["acme.note"]
    assert isinstance(good, Receipt)
    assert good.outcome is Outcome.ACCEPTED
    assert isinstance(bad, Refusal)
    assert (bad.reason, bad.detail) == (Reason.PAYLOAD_INVALID, "$.data.note breaks its rule")
    assert isinstance(built_in, Receipt)
    kept = stored(access, device)
    assert kept.payloads == {1, 2}
    assert ("refused", "payload_invalid") in kept.audits


async def test_it_is_unknown_without_the_folder(access: Access, device: Device):
    """A deployment that adds no kinds refuses it with `payload_invalid`."""
    async with running_service(Settings(), access) as service:
        verdict = await service.inbox.receive(device.inbound(device.envelope(1, data=GOOD)))
    assert isinstance(verdict, Refusal)
    assert verdict.reason is Reason.PAYLOAD_INVALID


async def test_an_open_schema_stops_the_start(access: Access, tmp_path: Path):
    """Nothing runs under a schema that is open; the one line says where."""
    settings = kinds_dir(tmp_path, SCHEMA | {"additionalProperties": True})
    with pytest.raises(StartupError, match=r"^kind schema acme\.note\.json, at #: "):
        async with running_service(settings, access):
            pass
