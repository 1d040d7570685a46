"""The signed set of a tenant's keys: who trusts one of them follows all rotations, and is led astray by nobody."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from fleet import as_owner
from outgoing import signing_key
from postseal.admin import signing_keys
from postseal.admin.actor import Actor
from postseal.envelope import canonical, ed25519, keyset
from postseal.envelope.keyset import KeysetRefused, follow
from postseal.errors import Refused
from postseal.outbound.keyset import Keysets
from postseal.outcomes import Reason
from postseal.postgres.access import Access
from postseal.postgres.database import Connection, Database, Part
from postseal.signing.pem_folder import PemFolder, path_of, write_key

pytestmark = pytest.mark.anyio

ADA = Actor("os:ada")
HOUR_S = 3_600
"""Of every overlap here."""


class Signing:
    """A tenant's signing keys: their acts, their files, and the set as a device is given it."""

    def __init__(self, access: Access, database: Database, folder: Path) -> None:
        self.access, self.database, self.folder = access, database, folder

    async def do(self, act: Any, *arguments: Any, **options: Any) -> Any:
        """One act."""
        async with Database(self.access.of(Part.ADMIN), prepare=True, size=1) as admin:

            async def work(connection: Connection) -> Any:
                return await act(connection, ADA, "acme", *arguments, **options)

            return await admin.transact(work)

    async def rotate(self) -> bytes:
        """Another key in place of the active one; its seed."""
        seed = ed25519.generate()
        write_key(self.folder, "acme", seed)
        await self.do(signing_keys.rotate, ed25519.public_key(seed), overlap_s=HOUR_S)
        return seed

    async def served(self) -> bytes:
        """What a device gets that asks now."""
        return msgspec.json.encode(await Keysets(self.database, PemFolder(self.folder)).of("acme"))


@pytest.fixture
def signing(access: Access, database: Database, destination: object, tmp_path: Path) -> Signing:
    """Tenant acme."""
    return Signing(access, database, tmp_path / "signing")


@pytest.fixture
def first(signing: Signing) -> bytes:
    """The seed of its first key."""
    return signing_key(signing.access, signing.folder)


def trusting(*seeds: bytes) -> dict[str, bytes]:
    """The public keys of these, by id."""
    public_keys = [ed25519.public_key(seed) for seed in seeds]
    return {ed25519.thumbprint(public_key): public_key for public_key in public_keys}


def keyid_of(seed: bytes) -> str:
    """Its key's id."""
    [keyid] = trusting(seed)
    return keyid


def believed(raw: bytes, *seeds: bytes, version: int = 0) -> keyset.Keyset:
    """What somebody who trusts these keys and has seen `version` makes of a set."""
    return follow(raw, tenant="acme", trusted=trusting(*seeds), version=version)


def forged(seed: bytes, payload: Any, kind: str = keyset.KEYSET_PAYLOAD_TYPE) -> bytes:
    """A set that a key signed over whatever bytes or document."""
    raw = payload if isinstance(payload, bytes) else canonical.encode(payload)
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(raw), raw)
    signed = keyset.wrap(raw, [(keyid_of(seed), ed25519.sign(seed, message))])
    return msgspec.json.encode(msgspec.structs.replace(signed, payload_type=kind))


async def test_who_trusts_an_old_key_follows_two_rotations(signing: Signing, first: bytes) -> None:
    """At once, and step by step; versions grow, and the newest key is active."""
    before = believed(await signing.served(), first)
    second = await signing.rotate()
    between = believed(await signing.served(), first, version=before.version)
    third = await signing.rotate()
    raw = await signing.served()
    after = believed(raw, first, version=between.version)
    assert before.version < between.version < after.version
    assert follow(raw, tenant="acme", trusted=between.trusted(), version=between.version) == after
    assert after.trusted() == trusting(first, second, third)
    assert [(key.keyid, key.state) for key in after.keys] == [
        (keyid_of(first), "retiring"),
        (keyid_of(second), "retiring"),
        (keyid_of(third), "active"),
    ]


async def test_one_version_is_always_the_same_bytes(signing: Signing, first: bytes) -> None:
    """Also once a retiring key's time is over; other keys being here may only change who signs it."""
    await signing.rotate()
    before = json.loads(await signing.served())
    path_of(signing.folder, "acme", keyid_of(first)).unlink()
    after = json.loads(await signing.served())
    assert before["payload"] == after["payload"]
    assert len(before["signatures"]) == 2
    assert keyid_of(first) not in {each["keyid"] for each in after["signatures"]}


async def test_a_revoked_key_speaks_for_none(signing: Signing, first: bytes) -> None:
    """It signs no set although its file is there, and whoever follows trusts it no more."""
    second = await signing.rotate()
    await signing.do(signing_keys.revoke, keyid_of(first))
    raw = await signing.served()
    assert [each["keyid"] for each in json.loads(raw)["signatures"]] == [keyid_of(second)]
    with pytest.raises(KeysetRefused, match="no signature by a key that is trusted"):
        believed(raw, first)
    followed = believed(raw, second)
    assert followed.trusted() == trusting(second)
    assert [key.state for key in followed.keys] == ["revoked", "active"]


async def test_a_removed_key_is_in_no_set(signing: Signing, first: bytes) -> None:
    """Nor does it sign one."""
    second = await signing.rotate()
    with as_owner(signing.access) as owner:
        owner.execute("UPDATE signing_keys SET accept_until = now() - interval '9 days' WHERE state = 'retiring'")
    await signing.do(signing_keys.remove, keyid_of(first), window_s=HOUR_S)
    raw = await signing.served()
    assert [key.keyid for key in believed(raw, second).keys] == [keyid_of(second)]
    assert len(json.loads(raw)["signatures"]) == 1


async def test_a_set_that_nobody_here_can_sign_is_not_served(signing: Signing, first: bytes) -> None:
    """Nor one of a tenant without keys: `signing_unavailable`, whether once or again."""
    path_of(signing.folder, "acme", keyid_of(first)).unlink()
    for tenant in ("acme", "nobody"):
        with pytest.raises(Refused) as refused:
            await Keysets(signing.database, PemFolder(signing.folder)).of(tenant)
        assert refused.value.reason is Reason.SIGNING_UNAVAILABLE


async def test_any_dsse_library_verifies_it(signing: Signing, first: bytes) -> None:
    """With each of its keys, over exactly the bytes of the payload."""
    second = await signing.rotate()
    envelope = Envelope.from_dict(json.loads(await signing.served()))
    keys = [
        SSlibKey(keyid, "ed25519", "ed25519", {"public": public_key.hex()})
        for keyid, public_key in trusting(first, second).items()
    ]
    assert len(envelope.verify(keys, 2)) == 2


async def test_who_follows_is_led_astray_by_nobody(signing: Signing, first: bytes) -> None:
    """By no older set, no other tenant's, no other kind of document, and nothing that is not whole or not canonical."""
    stranger = ed25519.generate()
    raw = await signing.served()
    whole = believed(raw, first)
    document = json.loads(keyset.encode(whole))
    [key] = document["keys"]
    other = {"keyid": keyid_of(stranger), "publicKey": key["publicKey"], "state": "active"}
    refused: list[tuple[bytes, int, str]] = [
        (raw, whole.version + 1, "older than what is known"),
        (forged(stranger, document), 0, "no signature by a key that is trusted"),
        (
            raw.replace(keyid_of(first).encode(), keyid_of(stranger).encode()),
            0,
            "no signature by a key that is trusted",
        ),
        (forged(first, document, "application/vnd.controlplane.event.v1+json"), 0, "payloadType is not"),
        (forged(first, document | {"tenant": "other"}), 0, "another tenant's"),
        (forged(first, document | {"more": 1}), 0, "no set of keys"),
        (forged(first, document | {"keys": [other]}), 0, "no set of keys"),
        (forged(first, json.dumps(document, indent=1).encode()), 0, "not in canonical form"),
        (b"[]", 0, "no DSSE envelope"),
        (b"[" * 100_000, 0, "at most"),
    ]
    for body, version, line in refused:
        with pytest.raises(KeysetRefused, match=line):
            believed(body, first, version=version)
    assert believed(forged(first, document), first, version=whole.version) == whole
