"""Proof of possession at enrolment."""

from postseal.envelope import ed25519, enrolment

SEED = bytes(range(32))
PUBLIC = ed25519.public_key(SEED)
CLAIM = {"code": "c0de", "device": "device-01", "keyid": ed25519.thumbprint(PUBLIC), "tenant": "acme"}


def test_proof_bytes():
    """The signed bytes are the PAE of the enrolment type and the canonical members, byte for byte."""
    expected = (
        b"DSSEv1 46 application/vnd.controlplane.enrolment.v1+json 106 "
        b'{"code":"c0de","device":"device-01",'
        b'"keyid":"1IG2tMH7J2wbJZnOf8LJzQitKf7LMvoAElsuDMVM54Y","tenant":"acme"}'
    )
    assert enrolment.proof_bytes(**CLAIM) == expected


def test_a_proof_holds_for_its_claim_alone():
    """Another code, device, key id, tenant, key or signature proves nothing."""
    proof = enrolment.prove(SEED, **CLAIM)
    assert enrolment.proves(PUBLIC, proof, **CLAIM)
    for name in CLAIM:
        assert not enrolment.proves(PUBLIC, proof, **{**CLAIM, name: "other"})
    assert not enrolment.proves(ed25519.public_key(bytes(32)), proof, **CLAIM)
    assert not enrolment.proves(PUBLIC, bytes(64), **CLAIM)
    assert not enrolment.proves(PUBLIC, proof[:-1], **CLAIM)


def test_members_cannot_be_shifted_into_one_another():
    """Quotes in a code do not let it pose as another member."""
    proof = enrolment.prove(SEED, **CLAIM)
    posing = {**CLAIM, "code": 'c0de","device":"device-01', "device": ""}
    assert not enrolment.proves(PUBLIC, proof, **posing)
