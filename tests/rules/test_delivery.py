"""What becomes of a delivery after an attempt (protocol section 7)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postseal.rules.delivery import Attempted, Backoff, Code, Decision, SealCode, Verdict, decide, gives_up

BACKOFF = Backoff(base_s=5, factor=2, cap_s=3600, jitter=0.2)
RETRIED = [code for code in Code if code is not Code.REJECTED]
attempts = st.integers(1, 100)
randoms = st.floats(0, 1, exclude_max=True)


def after(attempted: Attempted, *, attempt: int = 1, attempt_limit: int = 8, random: float = 0.0) -> Decision:
    """The decision under the usual backoff."""
    return decide(attempted, attempt=attempt, attempt_limit=attempt_limit, backoff=BACKOFF, random=random)


@given(attempts, attempts)
def test_what_was_taken_is_delivered(attempt: int, attempt_limit: int):
    """Whichever attempt it was."""
    assert after(Attempted(), attempt=attempt, attempt_limit=attempt_limit) == Decision(Verdict.DELIVERED)


@pytest.mark.parametrize("code", RETRIED)
def test_every_failure_but_a_rejection_is_tried_again_up_to_the_limit(code: Code):
    """A receiver that is gone too: its destination is disabled and holds the mail. The last attempt gives up."""
    decisions = [after(Attempted(code), attempt=attempt, attempt_limit=3) for attempt in (1, 2, 3, 4)]
    assert [decision.verdict for decision in decisions] == [Verdict.RETRY] * 2 + [Verdict.DEAD] * 2
    assert {decision.code for decision in decisions} == {code}


def test_a_rejection_is_final():
    """The device said that it never wants it."""
    assert after(Attempted(Code.REJECTED)) == Decision(Verdict.DEAD, Code.REJECTED)


@given(st.integers(1, 1000), st.integers(1, 100), randoms)
def test_what_was_not_sent_for_a_reason_of_ours_costs_no_attempt(attempt: int, attempt_limit: int, random: float):
    """It is given back with its code, and waits as after a failure; also when no attempt is left."""
    for code in (Code.SECRET_UNUSABLE, Code.SENDER_FAILED):
        decision = after(Attempted(code, ours=True), attempt=attempt, attempt_limit=attempt_limit, random=random)
        assert decision == Decision(Verdict.RELEASE, code, BACKOFF.delay_s(attempt, random))


def test_waits_double_up_to_the_cap():
    """Without jitter: 5, 10, 20 seconds, and no more than an hour however many attempts there were."""
    waits = [BACKOFF.delay_s(attempt, 0.0) for attempt in range(1, 101)]
    assert waits[:4] == [5, 10, 20, 40]
    assert waits[10:] == [3600] * 90


@given(attempts, randoms)
def test_jitter_shortens_by_at_most_its_share(attempt: int, random: float):
    """So that the cap holds, and no retry comes at once."""
    longest = BACKOFF.delay_s(attempt, 0.0)
    assert longest * 0.8 <= BACKOFF.delay_s(attempt, random) <= longest


def test_jitter_spreads():
    """Two that failed together do not return together."""
    assert BACKOFF.delay_s(3, 0.1) != BACKOFF.delay_s(3, 0.9)


@given(attempts, randoms, st.none() | st.floats(-1e9, 1e9))
def test_retry_after_lengthens_within_the_cap_and_never_shortens(
    attempt: int, random: float, retry_after_s: float | None
):
    """A receiver can neither have itself hammered nor put its mail off for days."""
    failed = Attempted(Code.RATE_LIMITED, retry_after_s)
    decision = after(failed, attempt=attempt, attempt_limit=101, random=random)
    own_s = BACKOFF.delay_s(attempt, random)
    assert decision.verdict is Verdict.RETRY
    assert own_s <= decision.delay_s <= BACKOFF.cap_s
    assert math.isclose(decision.delay_s, max(own_s, min(retry_after_s or 0, BACKOFF.cap_s)))


@pytest.mark.parametrize("code", SealCode)
def test_an_intent_is_given_up_where_waiting_cannot_help(code: SealCode):
    """What has expired or is another's key at once, what is not valid after ten tries, all others never."""
    tries = next((tries for tries in range(1, 1_000) if gives_up(code, tries)), None)
    assert tries == {"expired": 1, "idempotency_conflict": 1, "payload_invalid": 10}.get(code)
