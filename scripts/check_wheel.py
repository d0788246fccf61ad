"""Print what is in the one wheel of a folder, and fail if it is larger than it may be not for every Python, or tells
where it was built."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

LIMIT = 6_000_000
"""Bytes."""


def main(folder: str) -> str | None:
    """Check the wheel; the message of what is wrong, or None."""
    wheels = sorted(Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        return f"{folder}: expected one wheel, found {len(wheels)}"
    wheel = wheels[0]
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        for entry in sorted(archive.infolist(), key=lambda entry: -entry.file_size)[:3]:
            print(f"  {entry.file_size:>9,} bytes  {entry.filename}")
        home = str(Path.home()).encode()
        tells = [name for name in archive.namelist() if len(home) > 1 and home + b"/" in archive.read(name)]
    print(f"{wheel}: {size:,} bytes of {LIMIT:,}")
    if "-abi3-" not in wheel.name:
        return f"{wheel.name}: expected an abi3 wheel"
    if size >= LIMIT:
        return f"{wheel.name}: {size:,} bytes, expected less than {LIMIT:,}"
    if tells:
        return f"{wheel.name}: {', '.join(tells)} names folders of the machine that built it"
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
