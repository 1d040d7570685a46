"""The published JSON Schema (2020-12) of the payload, which a test holds against `v1`."""

import json
from importlib import resources

from postseal.envelope.kinds import NO_KINDS, Kinds


def payload_schema(kinds: Kinds = NO_KINDS) -> bytes:
    """Return the schema as UTF-8 JSON. It describes everything about a payload but its canonical form.

    Each of `kinds` stands in it under `$defs`, as a schema resource of its own whose references stay its own.
    """
    published = resources.files("postseal.envelope").joinpath("schemas", "payload.v1.schema.json").read_bytes()
    if not kinds:
        return published
    schema = json.loads(published)
    for name, kind in kinds.items():
        identifier = f"urn:postseal:schema:kind:{name}"
        resource = {keyword: value for keyword, value in kind.schema.items() if keyword != "$schema"}
        schema["$defs"][name] = resource | {"$id": identifier}
        schema["$defs"]["data"]["oneOf"].append({"$ref": identifier})
    return json.dumps(schema, ensure_ascii=False, indent=2).encode()
