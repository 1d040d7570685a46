"""Signals interrupt nothing where there is something to release: each test is a program of its own, which gets them."""

import signal
import subprocess
import sys

import pytest

BEGIN = """
import asyncio, os, signal
from postseal.ending import *
def signalled(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
"""


def ran(program: str) -> tuple[int, list[str]]:
    """The exit code of a program, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_held_signal_breaks_no_step_and_ends_the_process_behind_the_last(number: signal.Signals) -> None:
    """Whatever runs goes on to its end; then the exit code tells the signal."""
    program = f"""
with signals_held():
    try:
        signalled({number})
        print("step")
    finally:
        print("released")
print("never")
"""
    assert ran(program) == (128 + number, ["step", "released"])


def test_a_held_signal_ends_the_process_where_it_may_end() -> None:
    """At `end_if_asked`, and what is open is released on the way."""
    program = """
with signals_held():
    end_if_asked()
    try:
        signalled()
        end_if_asked()
        print("never")
    finally:
        print("released")
"""
    assert ran(program) == (143, ["released"])


def test_a_second_signal_ends_the_process_at_once() -> None:
    """Whatever hangs in the release cannot keep a process alive."""
    program = """
with signals_held():
    try:
        signalled()
        print("step", flush=True)
    finally:
        signalled()
        print("never")
"""
    assert ran(program) == (143, ["step"])


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_signal_cancels_what_runs_until_asked(when: str) -> None:
    """Also one that came before the loop ran; what the flow holds is released."""
    program = f"""
async def flow():
    try:
        if {when == "within"}:
            signalled()
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("released")
with signals_held():
    if {when == "before"}:
        signalled()
    run_until_asked(flow())
print("never")
"""
    assert ran(program) == (143, ["released"])


def test_a_flow_that_comes_to_its_end_keeps_its_result() -> None:
    """Without a signal nothing is different, and signals mean again what they meant."""
    program = """
async def flow():
    return 7
with signals_held():
    print(run_until_asked(flow()))
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""
    assert ran(program) == (0, ["7", "True"])


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_signal_asks_a_service_for_its_end_and_is_answered_by_it(when: str) -> None:
    """A service that ends in its own time ends well."""
    program = f"""
async def serve():
    with ending_asked_by_signals(60) as ending:
        if {when == "within"}:
            signalled()
        await ending.asked.wait()
        print("answered what was in flight")
with signals_held():
    if {when == "before"}:
        signalled()
    asyncio.run(serve())
    end_if_asked()
print("ended")
"""
    assert ran(program) == (0, ["answered what was in flight", "ended"])


def test_an_end_that_hangs_is_cut() -> None:
    """Within the seconds that it was given, with the code of one that did not come to its end."""
    program = """
async def serve():
    with ending_asked_by_signals(0.1) as ending:
        signalled()
        await ending.asked.wait()
        await asyncio.Event().wait()
with signals_held():
    asyncio.run(serve())
"""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 143
    assert "was cut" in done.stdout + done.stderr
