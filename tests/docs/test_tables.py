"""The tables of docs/settings.md and docs/reasons.md say what the code says."""

import tables

from postseal.outcomes import Outcome, Reason
from postseal.web import answers

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
    outcomes, reasons = REASONS[: len(Outcome)], REASONS[len(Outcome) :]
    assert {row[0]: int(row[1]) for row in outcomes} == answers._STATUS_OF_OUTCOME
    known = {reason: status for reason, (status, _) in answers._STATUS_AND_TITLE_OF_REASON.items()}
    assert {row[0]: int(row[1]) for row in reasons} == known


def test_retryable():
    """The tables call those reasons retryable that the service does."""
    said = {row[0]: WIRE_WORDS[row[2]] for row in REASONS[len(Outcome) :]}
    assert said == {reason.value: reason.retryable for reason in Reason}
