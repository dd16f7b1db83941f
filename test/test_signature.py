"""Signed certificates: the run's key verifies, and nothing else does. The keys are made by the command of the docs."""

import base64
import hashlib
import json
import subprocess

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from trainer.compare.certificates import plain_replay, verification
from trainer.compare.certificates.certificate_checks import check_seal, check_signature
from trainer.errors import UserError
from trainer.reports import certificate, signature

CONTENT = {"format": 1, "command": "train_sft", **{name: kind() for name, kind in certificate.PARTS.items()}}
CONTENT["command"] = "train_sft"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """sign.pem, sign.pub; other.pem, other.pub; ssh, ssh.pub; rsa.pem."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("sign", "other"):
        make = (
            f"openssl genpkey -algorithm ed25519 -out {name}.pem && openssl pkey -in {name}.pem -pubout -out {name}.pub"
        )
        subprocess.run(make, shell=True, check=True, cwd=folder)
    subprocess.run("openssl genpkey -algorithm rsa -out rsa.pem -quiet", shell=True, check=True, cwd=folder)
    return folder


def signed(folder, key) -> dict:
    certificate.write(str(folder), CONTENT, str(key))
    return certificate.read(str(folder))


def test_a_certificate_verifies_with_its_key_only(keys, tmp_path):
    content = signed(tmp_path, keys / "sign.pem")
    assert check_seal(content) == [] and check_signature(content, str(keys / "sign.pub")) == []
    assert check_signature(content, None) is None
    assert "not one of this certificate" in check_signature(content, str(keys / "other.pub"))[0]
    # by the formula, without the code under test
    public = load_pem_public_key((keys / "sign.pub").read_bytes())
    text = json.dumps({k: v for k, v in content.items() if k not in ("blake2b", "signature")}, sort_keys=True)
    own = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    public.verify(base64.b64decode(content["signature"]["value"]), b"trainer certificate\n" + own.encode())


def test_an_edit_that_is_sealed_again_is_found(keys, tmp_path):
    content = signed(tmp_path, keys / "sign.pem") | {"total_steps": 7}
    content["blake2b"] = certificate.own_hash(content)
    assert check_seal(content) == [] and check_signature(content, str(keys / "sign.pub"))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "x",
        {},
        {"algorithm": "none", "value": ""},
        {"algorithm": "ed25519", "value": 3},
        {"algorithm": "ed25519", "value": ""},
        {"algorithm": "ed25519", "value": "é"},
        {"algorithm": "ed25519", "value": "AAAA"},
        {"algorithm": "ed25519", "value": base64.b64encode(bytes(64)).decode()},
    ],
)
def test_a_missing_or_wrong_signature_is_a_difference(value, keys):
    found = check_signature(CONTENT | {"signature": value}, str(keys / "sign.pub"))
    assert len(found) == 1 and "\n" not in found[0]


def test_what_is_no_key_is_one_line(keys, tmp_path):
    (tmp_path / "text").write_text("x")
    wrong = [tmp_path / "none", tmp_path / "text", tmp_path, keys / "rsa.pem"]
    for read, flag, other in (
        (signature.private_key, "--sign_key", "sign.pub"),
        (signature.public_key, "--key", "sign.pem"),
    ):
        for path in (*wrong, keys / other):
            with pytest.raises(UserError, match=f"^{flag}: ") as error:
                read(str(path))
            assert "\n" not in str(error.value)


def test_a_replay_does_not_end_a_signature(keys, tmp_path, monkeypatch):
    signed(tmp_path, keys / "sign.pem")
    with pytest.raises(UserError, match=r"--certify: certificate\.json is signed"):
        plain_replay.certify_steps(str(tmp_path), 1, "cpu", "model")


def test_a_certificate_that_nobody_checked_is_not_signed(keys, tmp_path, monkeypatch):
    places = {"dataset": None, "pretrain": None}

    def certify(run, **given):
        verification.verify_run(str(run), places, 1, "cpu", None, [], sign_key=str(keys / "sign.pem"), **given)

    (tmp_path / "model").mkdir()
    monkeypatch.setattr(verification, "_model_folder", lambda content, given: str(tmp_path / "model"))
    (tmp_path / "rows.jsonl").write_text("{}")
    paths = {"pretrain": str(tmp_path / "model"), "dataset": str(tmp_path / "rows.jsonl")}
    content = CONTENT | {"arguments": CONTENT["arguments"] | paths}
    certificate.write(str(tmp_path), content, str(keys / "sign.pem"))
    with pytest.raises(UserError, match=r"--sign_key: certificate\.json is signed, and nothing has checked"):
        certify(tmp_path)
    certificate.write(str(tmp_path), content, None)  # the signature is taken off, and the seal is whole
    with pytest.raises(UserError, match=r"--sign_key: .* is not as certified"):
        certify(tmp_path)
    assert "signature" not in certificate.read(str(tmp_path))
