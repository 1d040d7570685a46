"""The kept inputs, and the fuzzer that looks for more: nothing that arrives breaks a promise of its parser."""

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from corpus import FOLDER, bytes_of, files_of, text_of
from every_kind import DATA, JOB
from harnesses import HARNESSES

KEPT = [pytest.param(name, file, id=f"{name}-{file.stem}") for name in HARNESSES for file in files_of(name)]
MAX_KEPT_FILES = 200
MAX_KEPT_FILE_BYTES = 9 * 1024

RUNS = {"body": 2000, "payload": 2500, "kind": 400, "lines": 2000, "peer": 4000, "head": 4000, "enrol": 4000}
"""How many inputs `make test` tries, about a second's worth each."""
MAX_INPUT_BYTES = {"kind": 4096, "body": 8192}
MAX_INPUT_S = 10
"""No input of at most 8 KiB may take longer, on a busy machine too."""
SOAK_S = 50

TOKENS = sorted(
    {
        *("\\u0000", "\\ud800", "\\/", "\\\\", "null", "true", "1.0", "1e999", "-0", "9007199254740992", "[[", "]]"),
        *("controlplane/v1", "audience", "bearer ", "authorization: ", "content-type: ", "content-length: "),
        *("transfer-encoding: chunked", "content-encoding: ", "x-forwarded-for: ", "::ffff:", "fd00::1", "10.0.0.1"),
        *("\r\n", "\n", ",", "%", "\x00", "\xff", "=", "pse_", "publicKey", "proof", "$ref", "#/$defs/", "pattern"),
        *DATA,
        *(name for data in DATA.values() for name in data),
        *JOB,
    }
)
"""Words that the fuzzer would be long in finding by itself, for all harnesses."""


def test_the_corpus_is_small():
    """Few files, short, each input once, each in the one spelling, none without a harness."""
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert len(files) == len(KEPT) <= MAX_KEPT_FILES
    assert {folder.name for folder in FOLDER.iterdir()} == set(HARNESSES)
    kept = [(file.parent.name, bytes_of(file.read_text("ascii"))) for file in files]
    assert len(set(kept)) == len(kept)
    for file, (_, raw) in zip(files, kept, strict=True):
        assert file.stat().st_size <= MAX_KEPT_FILE_BYTES, file
        assert file.read_text("ascii") == text_of(raw), file


@pytest.mark.parametrize(("name", "file"), KEPT)
def test_kept_inputs(name: str, file: Path):
    """Each input that was once of interest keeps every promise of its harness."""
    HARNESSES[name](bytes_of(file.read_text("ascii")))


needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine or this Python"
)


@needs_atheris
@pytest.mark.parametrize("name", HARNESSES)
def test_a_seeded_run_of_the_fuzzer(name: str, tmp_path: Path, seed: int):
    """A fixed number of inputs, from the kept ones on."""
    fuzz(name, tmp_path, f"-seed={seed}", f"-runs={RUNS[name]}", deadline_s=100)


@needs_atheris
@pytest.mark.soak
@pytest.mark.parametrize("name", HARNESSES)
def test_a_long_run_of_the_fuzzer(name: str, tmp_path: Path, seed: int):
    """The same for as long as the clock says."""
    fuzz(name, tmp_path, f"-seed={seed}", f"-max_total_time={SOAK_S}", deadline_s=SOAK_S + 100)


def fuzz(name: str, folder: Path, *options: str, deadline_s: float) -> None:
    """Run a harness under the fuzzer, in a process and a folder of its own; what breaks it is shown in hex."""
    corpus, artifacts = folder / "corpus", folder / "artifacts"
    corpus.mkdir()
    artifacts.mkdir()
    for file in files_of(name):
        raw = bytes_of(file.read_text("ascii"))
        (corpus / hashlib.sha256(raw).hexdigest()).write_bytes(raw)
    words = folder / "words"
    words.write_text("".join(f'"{quoted(word)}"\n' for word in TOKENS))
    command = [
        *(sys.executable, str(Path(__file__).with_name("under_atheris.py")), name, str(corpus)),
        *(f"-artifact_prefix={artifacts}/", f"-dict={words}", f"-timeout={MAX_INPUT_S}"),
        *(f"-max_len={MAX_INPUT_BYTES.get(name, 2048)}", "-print_final_stats=1", *options),
    ]
    print(*command)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=deadline_s, check=False)
    print(done.stdout[-4000:], done.stderr[-4000:])
    found = [file.read_bytes().hex() for file in artifacts.iterdir()]
    assert not found, f"an input that breaks {name}, in hex: {found[0]}"
    assert done.returncode == 0


def quoted(word: str) -> str:
    """A word as a libFuzzer dictionary writes it."""
    return "".join(f"\\x{code:02x}" for code in word.encode("latin-1"))
