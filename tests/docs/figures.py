"""The tables of docs/performance.md, made from bench/results/*.json, each between marks of its own.

`python tests/docs/figures.py` writes them into the page again.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tables import DOCS, ROOT

PAGE: Final = DOCS / "performance.md"

Results = Mapping[str, Any]


def ingest(found: Results) -> str:
    """What `make bench` measured."""
    half = found["half_of_top_rate"]
    lines = [
        row("pgbench, the bare SQL, one transaction an envelope", found["pgbench_tps"], "1"),
        row("batches of 100", found["batch_rate"], found["batch_ratio"]),
        row("the same with a deployment's own kind", found["kind_rate"], f"{found['kind_ratio']} of batches"),
        row("single requests on 64 connections", found["single_rate"], found["single_ratio"]),
    ]
    return (
        f"`{found['command']}`, {found['cpus']} cores:\n\n"
        "| | envelopes/s | beside pgbench |\n|---|---|---|\n" + "".join(lines) + "\n"
        "At half of those rates:\n\n"
        "| | p50 | p99 | server's CPU an envelope | PostgreSQL's |\n|---|---|---|---|---|\n"
        + "".join(
            f"| {name} | {half[key]['p50_ms']:.0f} ms | {half[key]['p99_ms']:.0f} ms "
            f"| {half[key]['server_cpu_us']:.0f} µs | {half[key]['postgres_cpu_us']:.0f} µs |\n"
            for name, key in (("batches", "batch"), ("single requests", "single"))
        )
        + f"\nPeak memory: {found['server_rss_mib']} MiB the largest process of the server, "
        f"{found['server_rss_mib_total']} MiB all of them.\n"
    )


def large(found: Results) -> str:
    """What `make bench-large` measured."""
    pairs = (
        ("ten thousand identities", "small", f"{found['identities']:,} identities", "large"),
        ("no holes", "no_holes", "a window of alternate holes in every stream", "holes"),
        ("sixteen streams", "many", "one hot stream", "one"),
    )
    return (
        f"`{found['command']}`, {found['cpus']} cores:\n\n"
        "| | envelopes/s | | envelopes/s | ratio |\n|---|---|---|---|---|\n"
        + "".join(
            f"| {first} | {found[f'{one}_rate']:,} | {second} | {found[f'{other}_rate']:,} "
            f"| {found[f'{other}_ratio']} |\n"
            for first, one, second, other in pairs
        )
    )


def sweep(found: Results) -> str:
    """What `make bench-sweep` measured."""
    loads = sorted(each["load_average"] for side in found["rounds"].values() for each in side)
    return (
        f"`{found['command']}`, {found['cpus']} cores, other work on the machine (load average {loads[0]:.1f} to "
        f"{loads[-1]:.1f}):\n\n"
        f"| half of {found['top_rate']:,} envelopes/s, in batches of 100 | p50 | p99 |\n|---|---|---|\n"
        f"| nothing beside | {found['quiet_p50_ms']:.0f} ms | {found['quiet_p99_ms']:.0f} ms |\n"
        f"| {found['swept_a_second']:,} expired payloads a second are deleted | {found['sweeping_p50_ms']:.0f} ms "
        f"| {found['sweeping_p99_ms']:.0f} ms |\n"
        f"| ratio | | {found['p99_ratio']} |\n"
    )


def parts(found: Results) -> str:
    """What `make bench-parts` measured."""
    return (
        f"`{found['command']}`, {found['cpus']} cores:\n\n"
        "| step | µs an envelope |\n|---|---|\n"
        + "".join(f"| {step} | {us:.0f} |\n" for step, us in found["us_an_envelope"].items())
        + "\n| group of | CPU an envelope | until it is certain, an envelope |\n|---|---|---|\n"
        + "".join(
            f"| {size} | {each['cpu_us']:.0f} µs | {each['until_certain_us']:.0f} µs |\n"
            for size, each in found["groups"].items()
        )
    )


def outbox(found: Results) -> str:
    """What `make bench-outbox` measured."""
    ours = found["ours"]
    names = ("enqueue_single", "enqueue_batch", "claim_settle")
    everybody = {"postseal": ours, **found["peers"]}
    return (
        f"`{found['command']}`, {found['cpus']} cores, a second:\n\n"
        "| | enqueue, single | enqueue, batches of 100 | claim and settle |\n|---|---|---|---|\n"
        + "".join(
            f"| {name} {found['versions'][name]} | " + " | ".join(f"{each[key]:,}" for key in names) + " |\n"
            for name, each in everybody.items()
        )
        + f"\nOver HTTP to a local receiver: {ours['http_rate']:,} deliveries a second; the bare client reaches "
        f"{ours['http_client_rate']:,}.\n\n"
        f"A claim takes {ours['claim_ms_empty']} ms in an empty queue, {ours['claim_ms_million']} ms beside "
        f"{found['pending']:,} pending deliveries, and {ours['claim_ms_held']} ms there while a transaction is held "
        "open.\n"
    )


TABLES: Final[Mapping[str, Callable[[Results], str]]] = {
    "ingest": ingest,
    "parts": parts,
    "large": large,
    "outbox": outbox,
    "sweep": sweep,
}


def row(name: str, rate: int, ratio: object) -> str:
    """One line of the first table."""
    return f"| {name} | {rate:,} | {ratio} |\n"


def marked(name: str) -> re.Pattern[str]:
    """What finds a table in the page, with its marks."""
    return re.compile(rf"<!-- {name}\.json -->\n(.*?)<!-- end -->", re.DOTALL)


def table(name: str) -> str:
    """A table as it must be."""
    return TABLES[name](json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text()))


def main() -> None:
    """Write all tables into the page."""
    page = PAGE.read_text()
    for name in TABLES:
        whole = f"<!-- {name}.json -->\n{table(name)}<!-- end -->"
        page = marked(name).sub(lambda _, whole=whole: whole, page)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
