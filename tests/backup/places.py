"""Empty databases to restore into, and what is in a database."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fleet import as_owner
from postseal.postgres.access import Access
from postseal.postgres.binaries import find_client_programs
from postseal.postgres.scratch import name_beside
from postseal.postgres.snapshot import tables

ROWS = sql.SQL("SELECT t::text FROM postseal.{} AS t ORDER BY 1")


@dataclass(frozen=True)
class Target:
    """A database of a cluster."""

    cluster: Access
    access: Access
    name: str

    @property
    def scratch(self) -> str:
        """The name of the database that a restore fills."""
        return name_beside(self.name, "restoring")

    @property
    def all_names(self) -> set[str]:
        """Its name, and those of what a restore makes beside it."""
        return {self.name, self.scratch, name_beside(self.name, "replaced")}

    def databases(self) -> set[str]:
        """What is there of it, and beside it."""
        with psycopg.connect(self.cluster.owner) as owner:
            return {name for (name,) in owner.execute("SELECT datname FROM pg_database")} & self.all_names

    def is_untouched(self) -> bool:
        """Whether it is there, alone and empty."""
        with psycopg.connect(self.access.owner) as owner:
            return self.databases() == {self.name} and tables(owner) == []


@contextmanager
def new_target(cluster: Access) -> Iterator[Target]:
    """Make one; it is dropped at the end."""
    name = f"target_{uuid4().hex}"
    access = replace(cluster, owner=make_conninfo(cluster.owner, dbname=name))
    target = Target(cluster, access, name)
    with psycopg.connect(cluster.owner, autocommit=True) as owner:
        owner.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield target
        finally:
            for database in target.all_names:
                owner.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database)))


def contents(access: Access) -> dict[str, list[str]]:
    """Every row of every table, as text."""
    with as_owner(access) as owner:
        return {table: [row for (row,) in owner.execute(ROWS.format(sql.Identifier(table)))] for table in tables(owner)}


def definitions(access: Access) -> list[str]:
    """The schema as pg_dump writes it: tables, indexes, owners, grants, policies, functions."""
    with as_owner(access) as owner:
        major = owner.info.server_version // 10_000
    dumped = subprocess.run(
        [find_client_programs(major).bin / "pg_dump", "--schema-only", "--schema=postseal", f"--dbname={access.owner}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # `\restrict` has a random word.
    return [line for line in dumped.splitlines() if line and not line.startswith(("--", "\\"))]


def events(access: Access, action: str) -> list[dict[str, Any]]:
    """The details of the platform's acts of that name."""
    with as_owner(access) as owner:
        rows = owner.execute("SELECT detail FROM platform_audit_events WHERE action = %s ORDER BY id", [action])
        return [detail for (detail,) in rows]
