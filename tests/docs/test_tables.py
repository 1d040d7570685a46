"""The tables of docs/settings.md and docs/reasons.md say what the code says."""

import tables

from postseal.outcomes import Outcome, Reason
from postseal.postgres.invariants import Invariant
from postseal.verdicts import Receipt, Refusal
from postseal.web import answers

VERIFYING = list(tables.rows((tables.DOCS / "verifying.md").read_text()))
SETTINGS = (tables.DOCS / "settings.md").read_text()
REASONS = list(tables.rows((tables.DOCS / "reasons.md").read_text()))
WIRE_WORDS = {"yes": True, "no": False}


def test_settings_table():
    """Each setting stands in the table with its default, bounds and meaning; tables.py prints the table anew."""
    assert tables.settings_table() in SETTINGS


def test_each_word_once_and_in_order():
    """The tables name each outcome and each reason once, in the order in which the checks are made."""
    assert [row[0] for row in REASONS] == [*Outcome, *Reason]


def test_statuses():
    """The tables give the HTTP status that the service gives."""
    correlation_id = bytes(16)
    given = {
        outcome.value: answers.of_verdict(Receipt(outcome, bytes(32), 1, 1, 1, correlation_id)).status
        for outcome in Outcome
    } | {reason.value: answers.of_verdict(Refusal(reason, correlation_id)).status for reason in Reason}
    assert {row[0]: int(row[1]) for row in REASONS} == given


def test_retryable():
    """The tables call those reasons retryable that the service does."""
    said = {row[0]: WIRE_WORDS[row[2]] for row in REASONS[len(Outcome) :]}
    assert said == {reason.value: reason.retryable for reason in Reason}


def test_invariants_table():
    """The page names each invariant once, in the order in which they are listed."""
    assert [row[0] for row in VERIFYING] == list(Invariant)
