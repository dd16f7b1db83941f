"""Signatures of certificates: ed25519 (RFC 8032) over the certificate's own hash, by the package cryptography."""

import base64
import binascii
import os
from collections.abc import Callable

from trainer.errors import UserError

PURPOSE = b"trainer certificate\n"  # signed with the hash, so that no other signature of the same key fits
KEY_BYTES = 8192  # of a file; a key has some hundred bytes
MAKE = "openssl genpkey -algorithm ed25519 -out sign.pem"


def sign(own_hash: str, key_file: str) -> dict[str, str]:
    """The part `signature` of a certificate with this own hash. Raises UserError if the file is no private key."""
    key = private_key(key_file)
    return {"algorithm": "ed25519", "value": base64.b64encode(key.sign(PURPOSE + own_hash.encode())).decode()}


def differences(own_hash: str, signature: object, key_file: str) -> list[str]:
    """Why a signature is not one of this hash by the public key: one text, or none. Raises UserError without a key."""
    key = public_key(key_file)
    if signature is None:
        return ["the certificate is not signed"]
    is_known = isinstance(signature, dict) and signature.get("algorithm") == "ed25519"
    if not is_known or not isinstance(signature.get("value"), str):
        return ["the signature has another form than a run writes"]
    from cryptography.exceptions import InvalidSignature  # public_key has found the package

    try:
        key.verify(base64.b64decode(signature["value"], validate=True), PURPOSE + own_hash.encode())
    except (InvalidSignature, binascii.Error, ValueError):
        return [f"the signature is not one of this certificate by the key {key_file}"]
    return []


def private_key(path: str):
    """The ed25519 private key of a PEM or OpenSSH file without a password."""
    keys = _cryptography("--sign_key")
    readers = (keys.load_pem_private_key, keys.load_ssh_private_key)
    return _read("--sign_key", path, [lambda data, read=read: read(data, None) for read in readers], "sign", MAKE)


def public_key(path: str):
    """The ed25519 public key of a PEM or OpenSSH file."""
    keys = _cryptography("--key")
    make = "openssl pkey -in sign.pem -pubout -out sign.pub"
    return _read("--key", path, [keys.load_pem_public_key, keys.load_ssh_public_key], "verify", make)


def _cryptography(flag: str):
    """The part of the package that reads keys. It is an extra, so it is imported where it is used."""
    try:
        from cryptography.hazmat.primitives import serialization  # an extra
    except ImportError:
        raise UserError(flag, "cryptography is not installed", "pip install -e '.[sign]'") from None
    return serialization


def _read(flag: str, path: str, readers: list[Callable], method: str, make: str):
    """The key that one of the readers finds in a file."""
    from cryptography.exceptions import UnsupportedAlgorithm  # the caller has found the package
    from cryptography.hazmat.primitives.asymmetric import ed25519  # likewise

    kind = {"sign": ed25519.Ed25519PrivateKey, "verify": ed25519.Ed25519PublicKey}[method]
    path = os.path.expanduser(path)
    if not os.path.isfile(path):  # a FIFO would block
        raise UserError(flag, f"{path} is no file", f"a file of {make}")
    try:
        with open(path, "rb") as file:
            data = file.read(KEY_BYTES)
    except OSError as error:
        raise UserError(flag, f"{path} cannot be read: {error.strerror}", f"a file of {make}") from None
    name = {"sign": "private", "verify": "public"}[method]
    for read in readers:
        try:
            key = read(data)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
            continue
        if isinstance(key, kind):
            return key
    raise UserError(flag, f"{path} is no ed25519 {name} key without a password", f"a file of {make}")
