"""A public-domain English text, fetched when it is asked for.

    a file that the user names
    else  Debian's package bible-kjv-text: apt-get download --> dpkg-deb -x --> gzip -dc --> verses without numbers
    else  the licence texts that a Debian system has

Nothing is kept: the package is unpacked in a temporary folder.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "bible-kjv-text"
LICENCES = Path("/usr/share/common-licenses")
_SECONDS = 120.0


@dataclass(frozen=True)
class PublicText:
    """A text, and where it came from."""

    name: str
    text: str


class NoTextError(Exception):
    """No text can be had; says why."""


def find_text(file: Path | None = None) -> PublicText:
    """The text of ``file``, else of the package, else the licences.

    Raises:
        NoTextError: the file cannot be read, or there is neither a package nor a licence.
    """
    if file is not None:
        try:
            return PublicText(file.name, file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise NoTextError(f"{file}: expected a UTF-8 text: {error}") from error
    try:
        return fetch_package()
    except NoTextError as error:
        return read_licences(str(error))


def fetch_package() -> PublicText:
    """The King James Bible out of Debian's package. Raises NoTextError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # apt downloads as a user of its own
        _run(["apt-get", "download", "-q", PACKAGE], folder)
        packages = sorted(folder.glob(f"{PACKAGE}_*.deb"))
        if len(packages) != 1:
            raise NoTextError(f"apt-get download {PACKAGE}: expected one package, got {len(packages)}")
        _run(["dpkg-deb", "-x", packages[0].name, "."], folder)
        try:
            data = (folder / "usr/lib/bible.data").read_bytes()
        except OSError as error:
            raise NoTextError(f"{packages[0].name}: {error}") from error
        return PublicText(f"Debian's {PACKAGE} {packages[0].name.split('_')[1]}", verses(unpack(data)))


def read_licences(why: str = "") -> PublicText:
    """The licence texts of a Debian system, each once, by name. Raises NoTextError if there are none."""
    try:
        files = sorted(path for path in LICENCES.iterdir() if path.is_file() and not path.is_symlink())
        text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    except OSError as error:
        raise NoTextError(f"expected a file, {PACKAGE} or {LICENCES}: {why}; {error}") from error
    if not text.strip():
        raise NoTextError(f"expected a file, {PACKAGE} or {LICENCES}: {why}; the folder has no text")
    return PublicText(f"licence texts of {LICENCES}" + (f" ({why})" if why else ""), text)


def unpack(data: bytes) -> str:
    """The text of bible.data: a header, and windows that ``compress`` has packed one by one.

        0     4   "EC02"
        84    4   bytes of a window
        88    4   number of windows, n
        92    4n  where each begins; big-endian, as all numbers here
        then  3   the first bytes of a .Z file, which all windows share and none repeats

    Raises:
        NoTextError: not such a file.
    """
    try:
        if data[:4] != b"EC02":
            raise ValueError(f"begins with {data[:4]!r}")
        size, count = struct.unpack_from(">2I", data, 84)
        starts = struct.unpack_from(f">{count}I", data, 92)
        magic = data[starts[0] - 3 : starts[0]]
        parts = [
            _run(["gzip", "-dc"], None, magic + data[start:end])
            for start, end in zip(starts, (*starts[1:], len(data)), strict=True)
        ]
        if any(len(part) != size for part in parts[:-1]):
            raise ValueError(f"expected windows of {size} bytes")
        return b"".join(parts).decode("ascii")
    except (struct.error, ValueError, IndexError) as error:
        raise NoTextError(f"bible.data: expected the format EC02: {error}") from error


def verses(text: str) -> str:
    """Without the title and without the name of each verse: "Ge1:1 In the beginning" becomes "In the beginning"."""
    lines = text.splitlines()[1:]
    return "\n".join(re.sub(r"^\w+:\d+ ", "", line) for line in lines) + "\n"


def _run(command: list[str], folder: Path | None, data: bytes = b"") -> bytes:
    """What a program prints. Raises NoTextError, with the last line of its complaint."""
    try:
        done = subprocess.run(command, cwd=folder, input=data, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoTextError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise NoTextError(f"{' '.join(command)}: status {done.returncode}" + (f": {lines[-1]}" if lines else ""))
    return done.stdout
