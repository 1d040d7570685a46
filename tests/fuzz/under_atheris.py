"""Runs one harness under atheris, which takes its process over: `under_atheris.py HARNESS FOLDER -runs=N -seed=N …`.

What is given behind the harness is libFuzzer's. The folder has inputs to start from, as raw bytes, and receives those
that reach new code.
"""

import sys

import atheris

# The parser of payloads is no Python, so the other reading of them has to show the fuzzer what it reaches.
INSTRUMENTED = [
    "independent",
    "postseal.envelope",
    "postseal.inbound.inbox",
    "postseal.identity.codes",
    "postseal.web.calls",
    "postseal.web.enrolments",
    "postseal.web.head",
    "postseal.web.peer",
]

if __name__ == "__main__":
    with atheris.instrument_imports(include=INSTRUMENTED):  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]  # no types
        from harnesses import HARNESSES
    atheris.Setup([sys.argv[0], *sys.argv[2:]], HARNESSES[sys.argv[1]])
    atheris.Fuzz()
