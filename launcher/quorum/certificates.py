"""Certificates of the quorum. The authority's key follows from the job's secret, so that only its holders can make it.

Every node derives the same key and signs a certificate for itself. The authority's key is never written to a file.
Validity does not depend on the clock, because a node with a wrong clock is refused in words, not by TLS.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve P-256."""
_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elastrain quorum")])


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Files (PEM) of one node: the authority's certificate, the node's certificate, and its key (mode 0600)."""

    ca: Path
    cert: Path
    key: Path

    def context(self, *, server: bool, least: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """Return a TLS context in which both ends need a certificate of the authority. Names are not compared.

        least: the oldest version of TLS that is accepted.
        """
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = least
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(self.ca)
        made.load_cert_chain(self.cert, self.key)
        return made


def authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the private key of the authority, which is a function of the secret alone."""
    wide = hmac.digest(secret, b"elastrain: authority of the quorum", "sha512")
    return ec.derive_private_key(int.from_bytes(wide, "big") % (_ORDER - 1) + 1, ec.SECP256R1())


def make_pair(folder: Path, secret: bytes, host: str) -> Pair:
    """Write this node's certificate for `host`, its address for other nodes, into the folder. Raises OSError."""
    authority = authority_key(secret)
    key = ec.generate_private_key(ec.SECP256R1())
    pair = Pair(ca=folder / "ca.pem", cert=folder / "node.pem", key=folder / "node.key")
    _write(pair.ca, _authority_certificate(authority).public_bytes(serialization.Encoding.PEM))
    _write(pair.cert, _node_certificate(authority, key, host).public_bytes(serialization.Encoding.PEM))
    _write(
        pair.key,
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    return pair


def _authority_certificate(authority: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    public = authority.public_key()
    return (
        _builder(public, _AUTHORITY, serial=1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(authority, hashes.SHA256())
    )


def _node_certificate(
    authority: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePrivateKey, host: str
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elastrain node")])
    names = [_general_name(host), _general_name("127.0.0.1"), x509.DNSName("localhost")]
    # etcd's gateway for JSON connects to etcd itself with this certificate, so it serves both ends.
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return (
        _builder(key.public_key(), subject, serial=x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(uses, critical=False)
        .add_extension(x509.SubjectAlternativeName(list(dict.fromkeys(names))), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )


def _builder(public: ec.EllipticCurvePublicKey, subject: x509.Name, *, serial: int) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_AUTHORITY)
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _write(file: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(file, flags, 0o600), "wb") as opened:
        opened.write(content)
