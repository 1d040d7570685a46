"""No authorities but those that a test names: reading the system's takes longer than most tests here."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_system_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenSSL takes for the system's authorities is empty."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
