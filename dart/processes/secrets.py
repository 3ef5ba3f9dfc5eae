"""The credentials of a run's processes on other machines, as files in one folder.

    env.token rollout.token train.token control.token    one bearer token for each role
    tls.crt tls.key                                      the coordinator's certificate and its key
    ca.crt                                               the certificate authority that workers trust

`prepare` makes them for a coordinator that starts on a machine which its user did not choose. The names are those of
cert-manager's secrets, so that a folder which Kubernetes mounts looks the same.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import secrets
import tempfile
from pathlib import Path
from types import ModuleType
from typing import get_args

from dart.config.run import TokenRole
from dart.errors import UserError, unwritable

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
_TOKEN_BYTES = 32
_VALID = datetime.timedelta(days=365)


def token_file(folder: Path, role: str) -> Path:
    return folder / f"{role}.token"


def prepare(folder: Path, host: str) -> None:
    """Make what is missing: tokens once, a certificate again for each host that it does not name.

    The files are readable by their owner alone. Raises UserError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for role in get_args(TokenRole):
            if not token_file(folder, role).is_file():
                write_private(token_file(folder, role), secrets.token_urlsafe(_TOKEN_BYTES).encode())
        if not _names(folder / CERTIFICATE, host):
            certificate, key = _self_signed(host)
            # The certificate last: once it is there, none of them is made again.
            for name, content in ((KEY, key), (AUTHORITY, certificate), (CERTIFICATE, certificate)):
                write_private(folder / name, content)
    except OSError as error:
        raise UserError(
            f"{folder}: tokens cannot be kept there {unwritable(error, 'choose a writable folder')}"
        ) from None


def overrides(folder: Path) -> tuple[str, ...]:
    """The config's fields that name this folder's files, as `--set` options; its name may hold any characters."""
    tokens = {role: f"file:{token_file(folder, role)}" for role in get_args(TokenRole)}
    return (
        f"server.tokens={json.dumps(tokens)}",
        f"server.tls_certificate={json.dumps(str(folder / CERTIFICATE))}",
        f"server.tls_key={json.dumps(str(folder / KEY))}",
    )


def _names(certificate: Path, host: str) -> bool:
    if not certificate.is_file():
        return False
    x509 = _x509()
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    soon = datetime.datetime.now(datetime.UTC) + _VALID / 2
    return _alternative(host) in list(names) and found.not_valid_after_utc > soon


def _self_signed(host: str) -> tuple[bytes, bytes]:
    """(certificate, key) for this host, as PEM."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    x509 = _x509()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dart coordinator")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # other machines' clocks may be behind
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([_alternative(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), private


def _alternative(host: str) -> object:
    x509 = _x509()
    try:
        return x509.IPAddress(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        return x509.DNSName(host)


def _x509() -> ModuleType:
    """The module; an extra has it. Raises UserError."""
    try:
        from cryptography import x509
    except ImportError:
        raise UserError(
            "--host: a certificate cannot be made: pip install 'dart-gui-rl[launch]', or set "
            "server.tls_certificate, server.tls_key and server.tokens"
        ) from None
    return x509


def write_private(file: Path, content: bytes) -> None:
    """Whole or not at all, and only for the owner: workers on other machines look for it."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    Path(temporary).replace(file)
