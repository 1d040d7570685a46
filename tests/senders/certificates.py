"""Certificates to test with, made by the openssl program."""

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Authority:
    """An authority that nobody trusts unless told to."""

    folder: Path

    @property
    def file(self) -> Path:
        """Its certificate."""
        return self.folder / "ca.pem"

    def serving(self, name: str) -> ssl.SSLContext:
        """What a server needs to be `name`: DNS:… or IP:…."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        stem = self.folder / name.replace(":", "-")
        request = ["req", "-new", "-subj", "/CN=test", "-keyout", f"{stem}.key", "-out", f"{stem}.csr", *NEW_KEY]
        openssl(*request)
        extensions = Path(f"{stem}.ext")
        extensions.write_text(f"subjectAltName={name}\n")
        openssl(
            "x509", "-req", "-in", f"{stem}.csr", "-CA", str(self.file), "-CAkey", str(self.folder / "ca.key"),
            "-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", f"{stem}.pem",
        )  # fmt: skip
        context.load_cert_chain(f"{stem}.pem", f"{stem}.key")
        return context


NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def make_authority(folder: Path) -> Authority:
    """A new one, whose files stand in `folder`."""
    constraints = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"]
    openssl(
        "req", "-x509", "-days", "2", "-subj", "/CN=postseal test authority", *NEW_KEY, *constraints,
        "-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.pem"),
    )  # fmt: skip
    return Authority(folder)


def openssl(*arguments: str) -> None:
    """Run it."""
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
