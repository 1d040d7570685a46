"""Keys and signatures: public vectors, what is refused, and openssl's files."""

import subprocess
from pathlib import Path

import pytest

from postseal.envelope import ed25519

P = 2**255 - 19
GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493

# RFC 8032, section 7.1: secret key, public key, message, signature.
RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]

# The eight points of small order in their canonical encodings.
SMALL_ORDER = [
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]
X_ZERO_WITH_SIGN = [
    "0100000000000000000000000000000000000000000000000000000000000080",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
]
NOT_CANONICAL = [(y | sign << 255).to_bytes(32, "little").hex() for y in range(P, 2**255) for sign in (0, 1)]
OFF_CURVE = ["0200000000000000000000000000000000000000000000000000000000000000"]
# A good point plus one of order 8.
MIXED_ORDER = ["40a4cf5c611d737a2f1c6fcca84d9cabfed80987f186a5a6c57e629bff1af27f"]


def test_section_12_vector():
    """The seed 00 to 1f has the public key and key id that protocol section 12 gives."""
    public = ed25519.public_key(bytes(range(32)))
    assert public.hex() == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert ed25519.thumbprint(public) == "1IG2tMH7J2wbJZnOf8LJzQitKf7LMvoAElsuDMVM54Y"


def test_rfc_8037_thumbprint():
    """The key of RFC 8037, appendix A.3, has the thumbprint given there."""
    public = bytes.fromhex(RFC_8032[0][1])
    assert ed25519.thumbprint(public) == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


@pytest.mark.parametrize(("seed", "public", "message", "signature"), RFC_8032)
def test_rfc_8032_vectors(seed: str, public: str, message: str, signature: str):
    """Keys, signatures and their verification are those of RFC 8032."""
    assert ed25519.public_key(bytes.fromhex(seed)).hex() == public
    assert ed25519.sign(bytes.fromhex(seed), bytes.fromhex(message)).hex() == signature
    assert ed25519.verify(bytes.fromhex(public), bytes.fromhex(message), bytes.fromhex(signature))


def test_verify_is_over_exactly_the_message():
    """Another message, key or signature does not verify, nor does one of another length."""
    seed = ed25519.generate()
    public, signature = ed25519.public_key(seed), ed25519.sign(seed, b"message")
    assert ed25519.verify(public, b"message", signature)
    assert not ed25519.verify(public, b"messagf", signature)
    assert not ed25519.verify(public, b"message\0", signature)
    assert not ed25519.verify(ed25519.public_key(ed25519.generate()), b"message", signature)
    assert not ed25519.verify(public, b"message", bytes(64))
    assert not ed25519.verify(public[:31], b"message", signature)
    assert not ed25519.verify(public + b"\0", b"message", signature)
    # Shifting a byte from the message into the signature leaves the joined bytes as they were.
    assert not ed25519.verify(public, b"essage", signature + b"m")
    assert not ed25519.verify(public, signature[63:] + b"message", signature[:63])


def test_a_signature_is_not_malleable():
    """Adding the group order to S, the classic second signature, is refused."""
    seed = ed25519.generate()
    signature = ed25519.sign(seed, b"message")
    s = int.from_bytes(signature[32:], "little") + GROUP_ORDER
    assert not ed25519.verify(ed25519.public_key(seed), b"message", signature[:32] + s.to_bytes(32, "little"))


@pytest.mark.parametrize("point", [*SMALL_ORDER, *X_ZERO_WITH_SIGN, *NOT_CANONICAL, *OFF_CURVE, *MIXED_ORDER])
def test_a_weak_or_ambiguous_key_is_refused(point: str):
    """Small order, mixed order, not canonical, off the curve: none becomes a public key."""
    with pytest.raises(ValueError, match="no canonical Ed25519 public key"):
        ed25519.check_public_key(bytes.fromhex(point))


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_a_key_of_small_order_verifies_nothing(point: str):
    """Even unregistered, a key of small order does not verify the signature that holds for any message."""
    assert not ed25519.verify(bytes.fromhex(point), b"message", bytes.fromhex(point) + bytes(32))


def test_a_generated_key_is_accepted():
    """Keys that we make pass our own check; a key of another length does not."""
    public = ed25519.public_key(ed25519.generate())
    ed25519.check_public_key(public)
    for wrong in (b"", public[:31], public + b"\0"):
        with pytest.raises(ValueError, match="32 bytes"):
            ed25519.check_public_key(wrong)


def test_pem_is_openssl_s(tmp_path: Path):
    """A key file by openssl is read, written again byte for byte, and ours is read by openssl."""
    theirs = tmp_path / "theirs.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", theirs], check=True)
    seed = ed25519.seed_from_pem(theirs.read_bytes())
    assert ed25519.seed_to_pem(seed) == theirs.read_bytes()
    ours = ed25519.seed_to_pem(bytes(range(32)))
    command = ["openssl", "pkey", "-pubout", "-outform", "DER"]
    der = subprocess.run(command, input=ours, check=True, capture_output=True).stdout
    assert der[-32:] == ed25519.public_key(bytes(range(32)))


def test_pem_survives_a_windows_editor():
    """CRLF line ends and blank lines around the block change nothing."""
    pem = ed25519.seed_to_pem(bytes(range(32)))
    assert ed25519.seed_from_pem(b"\r\n" + pem.replace(b"\n", b"\r\n") + b"\r\n") == bytes(range(32))


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"secret",
        ed25519.seed_to_pem(bytes(32))[:-5],
        ed25519.seed_to_pem(bytes(32)) * 2,
        ed25519.seed_to_pem(bytes(32)).replace(b"PRIVATE", b"EC PRIVATE"),
        ed25519.seed_to_pem(bytes(32)).replace(b"MC4CAQAw", b"MC4CAQEw"),
        # RFC 8410's id-X25519 differs from id-Ed25519 in the last arc.
        ed25519.seed_to_pem(bytes(32)).replace(b"AwBQYDK2Vw", b"AwBQYDK2Vu"),
    ],
)
def test_another_pem_is_refused_without_quoting_it(pem: bytes):
    """Whatever is not one plain Ed25519 PKCS#8 block is a ValueError that says nothing of the file."""
    with pytest.raises(ValueError, match="one Ed25519 private key") as caught:
        ed25519.seed_from_pem(pem)
    assert "secret" not in str(caught.value)


def test_a_seed_has_32_bytes():
    """Only 32 bytes become a key file."""
    with pytest.raises(ValueError, match="32 bytes"):
        ed25519.seed_to_pem(bytes(31))
