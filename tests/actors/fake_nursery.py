"""A nursery for tests. Its workers write down who they are, then do what their file says: "exit 3", "raise", "wait"."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from cbdisagg.actors.nursery import run_nursery


def become(file: Path) -> None:
    words = file.read_text().split()
    me = {"parent": os.getppid(), "session": os.getsid(0), "descriptors": len(os.listdir("/proc/self/fd"))}
    written = file.with_suffix(".new")
    written.write_text(json.dumps(me))
    written.rename(file.with_suffix(".me"))
    if words[0] == "exit":
        sys.exit(int(words[1]))
    if words[0] == "raise":
        raise RuntimeError("a bug")
    time.sleep(600)


if __name__ == "__main__":
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    run_nursery(int(options["--channel"]), int(options["--supervisor-pid"]), become)
