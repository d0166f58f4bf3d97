"""Which settings may change while a service runs: a pure comparison of two configs.

What is decided at the start of the service (the model, how many workers, pools, ports, sockets) stays as it is. What
only steers decisions takes effect process by process, as each is started anew.
"""

from __future__ import annotations

import msgspec

from cbdisagg.config import Config, ConfigError

SECTIONS = ("targets", "scheduler", "policy", "limits", "debug")
FIXED = frozenset({"limits.body_mb", "limits.header_kb"})
"""Keys of those sections that the HTTP server has been built with."""


def check_reload(old: Config, new: Config) -> None:
    """Raises ConfigError: one line that names the first key that differs and may not."""
    for section in (item.name for item in msgspec.structs.fields(Config)):
        before, after = getattr(old, section), getattr(new, section)
        if before == after:
            continue
        if section == "workers":
            raise ConfigError("[[workers]] has changed: stop the service and start it again")
        for key in before.__struct_fields__:
            changed = getattr(before, key) != getattr(after, key)
            if changed and (section not in SECTIONS or f"{section}.{key}" in FIXED):
                raise ConfigError(
                    f"[{section}] {key} has changed from {getattr(before, key)!r} to {getattr(after, key)!r}: "
                    "stop the service and start it again"
                )
