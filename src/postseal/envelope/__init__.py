"""The wire of controlplane/v1, pure: bytes in, values or a refusal out; no network, no clock, no state.

Modules: `ed25519` (keys and signatures), `dsse` (the signed envelope around a payload), `canonical` (the one
byte form of a JSON value), `v1` (the closed payload), `enrolment` (proof of possession of a key), `kinds`
and `closed_schema` (the kinds that a deployment adds), `schema` (the published JSON Schema of the payload).
"""
