"""The published JSON Schema (2020-12) of the payload, which a test holds against `v1`."""

from importlib import resources


def payload_schema() -> bytes:
    """Return the schema as UTF-8 JSON. It describes everything about a payload but its canonical form."""
    return resources.files("postseal.envelope").joinpath("schemas", "payload.v1.schema.json").read_bytes()
