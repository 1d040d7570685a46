"""Statuses, titles and the fields that say when to come again."""

import pytest

from postseal.door import RateLimited
from postseal.limits import Quota
from postseal.outcomes import Outcome, Reason
from postseal.verdicts import Refusal
from postseal.web import answers

CORRELATION_ID = bytes(16)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_status_and_a_title(reason: Reason) -> None:
    """No refusal goes out without them."""
    status, title = answers._STATUS_AND_TITLE_OF_REASON[reason]
    assert 400 <= status < 600
    assert title
    answer = answers.of_refusal(Refusal(reason, CORRELATION_ID))
    comes_again = (Reason.UNAVAILABLE, Reason.SIGNING_UNAVAILABLE, Reason.DESTINATION_FULL)
    assert (b"retry-after" in dict(answer.headers)) is (reason in comes_again)


def test_every_outcome_has_a_status() -> None:
    """201 for what is new, 200 for what was there."""
    assert {outcome: 200 if outcome is Outcome.DUPLICATE else 201 for outcome in Outcome} == answers._STATUS_OF_OUTCOME


@pytest.mark.parametrize(("retry_after_s", "field"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (7.5, b"8")])
def test_when_to_come_again_is_a_whole_second(retry_after_s: float, field: bytes) -> None:
    """Rounded up and never nought, so that who comes then is not refused again for coming too early."""
    quota = Quota(granted=False, limit=10_000, remaining=0, retry_after_s=retry_after_s, window_s=5.0)
    answer = answers.of_refused(RateLimited(Reason.SYNC_RATE_LIMITED, quota, CORRELATION_ID), CORRELATION_ID)
    headers = dict(answer.headers)
    assert headers[b"retry-after"] == field
    assert headers[b"ratelimit-policy"] == b'"sync";q=10000;w=5'
    assert headers[b"ratelimit"] == b'"sync";r=0;t=' + field
