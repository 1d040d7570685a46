"""The published JSON Schemas (2020-12) of envelope and payload, which tests hold against `dsse` and `v1`."""

import json
from importlib import resources

from postseal.envelope.kinds import NO_KINDS, Kinds


def envelope_schema() -> bytes:
    """Return the schema of the outer envelope as UTF-8 JSON."""
    return _published("envelope.v1.schema.json")


def payload_schema(kinds: Kinds = NO_KINDS) -> bytes:
    """Return the schema as UTF-8 JSON. It describes everything about a payload but its canonical form.

    Each of `kinds` stands in it under `$defs`, as a schema resource of its own whose references stay its own.
    """
    published = _published("payload.v1.schema.json")
    if not kinds:
        return published
    schema = json.loads(published)
    for name, kind in kinds.items():
        identifier = f"urn:postseal:schema:kind:{name}"
        resource = {keyword: value for keyword, value in kind.schema.items() if keyword != "$schema"}
        schema["$defs"][name] = resource | {"$id": identifier}
        schema["$defs"]["data"]["oneOf"].append({"$ref": identifier})
    return json.dumps(schema, ensure_ascii=False, indent=2).encode()


def _published(name: str) -> bytes:
    return resources.files("postseal.envelope").joinpath("schemas", name).read_bytes()
