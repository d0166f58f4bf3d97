"""Compiles the C kernels beside their sources, where a wheel that is built next takes them along.

Whoever installs that wheel on the same system and processor needs no compiler; elsewhere the libraries lie idle, and
native.py compiles as ever. They need the C library of the machine that they were made on, or a newer one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cbdisagg_kernels.native import INSTRUCTION_SETS, PORTABLE, SOURCES, BuildError, build, is_x86


def main() -> None:
    """Exit status 1, and one line, if a library cannot be compiled."""
    known = [each.name for each in INSTRUCTION_SETS if is_x86() or each is PORTABLE]
    parser = argparse.ArgumentParser(
        prog="python -m cbdisagg_kernels.ship",
        description="Compile the C kernels into the source folder, for a wheel to take along.",
        epilog="example: python -m cbdisagg_kernels.ship && pip wheel --no-deps .",
    )
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"instruction sets; default: all of {', '.join(known)}")
    wanted = parser.parse_args().sets or known
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"{', '.join(unknown)}: this machine compiles for {', '.join(known)}")
    try:
        for path in ship(wanted, SOURCES):
            print(f"{path}: {path.stat().st_size >> 10} KiB")
    except BuildError as error:
        sys.exit(str(error))


def ship(names: Sequence[str], folder: Path) -> Iterator[Path]:
    """The library of each instruction set, compiled into `folder`; older ones are removed. Raises BuildError."""
    for each in INSTRUCTION_SETS:
        if each.name in names:
            path = build(each, folder)
            for other in folder.glob(f"{each.name}-*.so"):
                if other != path:
                    other.unlink()
            yield path


if __name__ == "__main__":
    main()
