"""docs/metrics.md lists the metrics that the service has, with their labels and meanings.

Run this file to print the tables anew.
"""

import re
from collections.abc import Iterator

import tables
from prometheus_client import Metric

from postseal.metrics import Metrics

HEAD = "| metric | type | labels | meaning |\n|---|---|---|---|\n"
LABELS_HEAD = "| label | values |\n|---|---|\n"
SAID_ELSEWHERE = {"reason": "each of [the reasons](reasons.md)", "version": "the version of postseal"}
PAGE = (tables.DOCS / "metrics.md").read_text()


def metrics_table() -> str:
    """The first table of the page as it must be."""
    return HEAD + "".join(
        f"| `{name}` | {family.type} | {', '.join(map('`{}`'.format, labels)) or 'none'} | {family.documentation} |\n"
        for name, family, labels in families()
    )


def labels_table() -> str:
    """The second: each label and its values."""
    values: dict[str, dict[str, None]] = {}
    for _, family, labels in families():
        for label in labels:
            values.setdefault(label, {}).update(dict.fromkeys(sample.labels[label] for sample in family.samples))
    return LABELS_HEAD + "".join(
        f"| `{label}` | {SAID_ELSEWHERE.get(label) or ', '.join(f'`{value}`' for value in seen)} |\n"
        for label, seen in values.items()
    )


def families() -> Iterator[tuple[str, Metric, list[str]]]:
    """Each metric: its name as it is scraped, its family, the names of its labels. Each has its series at the start."""
    for family in Metrics().registry.collect():
        labels = [label for label in family.samples[0].labels if label != "le"]
        yield family.name + ("_total" if family.type == "counter" else ""), family, labels


def test_the_list_is_that_of_the_code():
    """Every metric stands on the page with its type, labels and meaning, and no other does."""
    assert metrics_table() in PAGE
    assert labels_table() in PAGE
    known = {name.removesuffix("_total") for name, _, _ in families()}
    named = set(re.findall(r"postseal_[a-z_]+", PAGE))
    assert {re.sub("_(total|bucket)$", "", name) for name in named} == known


def test_names_say_their_unit():
    """All begin alike; counters, and only they, end in `_total`; times are in seconds, sizes in bytes."""
    for name, family, _ in families():
        assert name.startswith("postseal_")
        assert name.endswith("_total") == (family.type == "counter")
        assert ("econds" in family.documentation) <= ("seconds" in name)
        assert ("ytes" in family.documentation) <= ("bytes" in name)


if __name__ == "__main__":
    print(metrics_table(), labels_table(), sep="\n", end="")
