"""Keys of both ends of a link, made anew for a test: CURVE pairs, and certificates of a private authority."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark_proto.transports import CurveFiles, Security, TlsFiles
from dspark_proto.transports.curve import write_curve_keys

_CERTIFICATES = """
set -e
umask 077
curve="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
printf 'subjectAltName=IP:127.0.0.1' > extension
for authority in ca other; do
  openssl req -x509 $curve -days 2 -subj /CN=$authority -keyout $authority.key -out $authority.pem
done
sign() {
  openssl req $curve -subj /CN=$1 -keyout $1.key -out $1.csr
  openssl x509 -req -in $1.csr -CA $2.pem -CAkey $2.key -CAcreateserial -days 2 -extfile extension -out $1.pem
}
sign worker ca
sign spark ca
sign stranger other
printf 'subjectAltName=DNS:elsewhere' > extension
sign elsewhere ca
"""


@dataclass(frozen=True)
class Keys:
    """Directories with keys: of the worker, of a verifier that it knows, and of a stranger."""

    curve: Path
    tls: Path | None

    def curve_of(self, name: str, peers: str) -> Security:
        return Security(curve=CurveFiles(self.curve / name, self.curve / peers))

    def tls_of(self, name: str, authority: str = "ca") -> Security:
        if self.tls is None:
            pytest.skip("no openssl program here to make certificates")
        files = TlsFiles(self.tls / f"{authority}.pem", self.tls / f"{name}.pem", self.tls / f"{name}.key")
        return Security(tls=files)


def make_keys(root: Path) -> Keys:
    curve, tls = root / "curve", root / "tls"
    curve.mkdir()
    for name in ("worker", "spark", "stranger"):
        write_curve_keys(curve / name)
    (curve / "allowed").write_bytes(b"# verifiers\n\n" + (curve / "spark.pub").read_bytes())
    if shutil.which("openssl") is None:
        return Keys(curve, None)
    tls.mkdir()
    subprocess.run(["sh", "-c", _CERTIFICATES], cwd=tls, check=True, capture_output=True)
    return Keys(curve, tls)
