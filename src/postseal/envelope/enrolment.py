"""Proof of possession: what a new key signs, so that an enrolment code binds it to a device.

Source: protocol section 8.
"""

from postseal.envelope import canonical, dsse, ed25519

ENROLMENT_PAYLOAD_TYPE = "application/vnd.controlplane.enrolment.v1+json"


def proof_bytes(*, code: str, device: str, keyid: str, tenant: str) -> bytes:
    """Return the bytes to sign: the PAE of the enrolment type and the four members in canonical form."""
    payload = canonical.encode({"code": code, "device": device, "keyid": keyid, "tenant": tenant})
    return dsse.pae(ENROLMENT_PAYLOAD_TYPE, payload)


def prove(seed: bytes, *, code: str, device: str, keyid: str, tenant: str) -> bytes:
    """Return the proof, 64 bytes: the signature of `seed`'s key over `proof_bytes`.

    `keyid` names the key that is enrolled: `seed`'s own, or, where a current key of the device vouches for a
    further one, that further key's.
    """
    return ed25519.sign(seed, proof_bytes(code=code, device=device, keyid=keyid, tenant=tenant))


def proves(public_key: bytes, proof: bytes, *, code: str, device: str, keyid: str, tenant: str) -> bool:
    """Say whether `proof` is `public_key`'s signature over exactly these four members."""
    message = proof_bytes(code=code, device=device, keyid=keyid, tenant=tenant)
    return ed25519.verify(public_key, message, proof)
