"""A decode worker in a process of its own: `python peer.py FOLDER KIND`.

Prints its WorkerInfo. Then reads one JSON order a line: a Probe to verify (prints what it saw), an attempt to
expect (prints "expecting"), or "read" (prints the CRC-32 of the named pages). Prints "landed" for each attempt that
has landed.
"""

from __future__ import annotations

import json
import sys
import zlib

import msgspec

from cbdisagg.config import Transfer as Settings
from cbdisagg.messages import Address, AttemptId, Probe, WorkerInfo
from cbdisagg.transfer.pool import create_pool
from cbdisagg.transfer.select import make_transfer


def main(folder: str, kind: str) -> None:
    me = Address("peer", 77, f"ipc://{folder}/peer")
    pool = create_pool(me, 5, 24, 4096)
    transfer = make_transfer(
        Settings(kind=kind),
        pool,
        me,
        "here",
        lambda *_: None,
        lambda _: print("landed", flush=True),
        on_broken=lambda *_: None,
    )
    print(msgspec.json.encode(WorkerInfo(me, "decode", "here", "", transfer.info, 16, 8, 384)).decode(), flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case {"probe": probe, "sender": sender}:
                seen = transfer.verify(msgspec.convert(sender, Address), msgspec.convert(probe, Probe))
                print(seen.kind or seen.note, flush=True)
            case {"expect": attempt, "source": source, "pages": pages}:
                transfer.expect(msgspec.convert(attempt, AttemptId), msgspec.convert(source, Address), tuple(pages))
                print("expecting", flush=True)
            case {"read": pages}:
                print(zlib.crc32(pool.pages[:, pages].tobytes()), flush=True)
    transfer.close()
    pool.close()


main(*sys.argv[1:])
