"""Where the mailboxes of one service bind, and the keys that let them in: pure settings, no sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import zmq.auth

from cbdisagg.config import Cluster, ConfigError


@dataclass(frozen=True, slots=True)
class Keys:
    """The CURVE key pair that all processes of one service share (Z85 text)."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where mailboxes bind: Unix sockets in `folder` (private, 0700), or tcp at the IP address `bind` with `keys`.

    `advertise` is the address that peers use to reach `bind`; empty means the same.
    """

    folder: Path
    bind: str = ""
    advertise: str = ""
    keys: Keys | None = None

    @classmethod
    def of(cls, cluster: Cluster, folder: Path) -> Place:
        """Raises ConfigError when tcp is asked for without a readable key pair."""
        if not cluster.bind:
            return cls(folder)
        return cls(folder, cluster.bind, cluster.advertise, read_keys(cluster.curve_keys))


def read_keys(folder: str) -> Keys:
    """The pair `cbdisagg.key`, `cbdisagg.key_secret` in `folder` (as `zmq.auth.create_certificates` writes it)."""
    if not folder:
        raise ConfigError("[cluster] bind is set, so curve_keys is needed: messages cross a network only encrypted")
    path = Path(folder) / "cbdisagg.key_secret"
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"[cluster] curve_keys = {folder!r}: cannot read {path.name}: {error}") from error
    if secret is None:
        raise ConfigError(f"[cluster] curve_keys = {folder!r}: {path.name} holds no secret key")
    return Keys(public, secret)


def bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
