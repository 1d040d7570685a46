"""Which part of a tenant's list is wanted: lists can be long, and be shown to somebody who may see only some of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListPart:
    """At most `limit` rows behind the row named `after`, of what `projects` have a share in; None lets all pass."""

    projects: list[str] | None = None
    after: str | None = None
    limit: int | None = None


WHOLE = ListPart()
