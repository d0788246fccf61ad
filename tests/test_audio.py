"""WAV files, resampling, and Whisper's features against transformers' numbers."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import InvalidArgument
from kvcore.audio import load_wav, log_mel, mel_filters, resample

DATA = Path(__file__).parent / "data"
SPEECH = DATA / "audio" / "espeak_16k.wav"


def write(path: Path, samples: np.ndarray, *, rate: int = 16_000, width: int = 2) -> Path:
    """samples [n] or [n, channels] from -1 to 1, as integers of so many bytes."""
    scale = float(1 << (8 * width - 1))
    values = np.clip(np.round(samples * scale), -scale, scale - 1).astype(np.int64)
    values = values + 128 if width == 1 else values
    data = values.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


def tone(hertz: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_integers_of_every_width(width: int, tmp_path: Path) -> None:
    samples = tone(440, 16_000)
    samples[:2] = -1, 0
    got = load_wav(write(tmp_path / "a.wav", samples, width=width))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, samples, atol=1.01 / (1 << (8 * width - 1)) + 1e-7)


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = tone(440, 16_000), tone(880, 16_000)
    got = load_wav(write(tmp_path / "a.wav", np.stack([left, right], 1)))
    np.testing.assert_allclose(got, (left + right) / 2, atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_other_rates_are_resampled(rate: int, tmp_path: Path) -> None:
    got = load_wav(write(tmp_path / "a.wav", tone(1_000, rate), rate=rate, width=4))
    want = tone(1_000, 16_000)[: len(got)]
    assert abs(len(got) - 8_000) <= 2
    np.testing.assert_allclose(got[200:-200], want[200 : len(got) - 200], atol=1e-3)


def test_what_the_lower_rate_cannot_hold_is_gone() -> None:
    assert np.abs(resample(tone(9_000, 48_000).astype(np.float32), 48_000)[200:-200]).max() < 1e-3
    np.testing.assert_allclose(resample(np.full(4_000, 0.5, np.float32), 44_100)[200:-200], 0.5, atol=1e-3)


@pytest.mark.parametrize("content", [b"", b"RIFF", b"no sound at all", SPEECH.read_bytes()[:30]])
def test_files_that_are_no_sound(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.wav"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"bad\.wav: expected a WAV file"):
        load_wav(path)


def test_files_that_are_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="expected a WAV file, got No such file"):
        load_wav(tmp_path / "none.wav")
    with pytest.raises(InvalidArgument, match="at least one sample"):
        load_wav(write(tmp_path / "empty.wav", np.zeros(0)))
    data = bytearray(SPEECH.read_bytes())
    data[20:22] = (3).to_bytes(2, "little")  # floats
    (tmp_path / "float.wav").write_bytes(bytes(data))
    with pytest.raises(InvalidArgument, match="integer samples, got unknown format: 3"):
        load_wav(tmp_path / "float.wav")
    (tmp_path / "cut.wav").write_bytes(SPEECH.read_bytes()[:1001])
    assert 400 < len(load_wav(tmp_path / "cut.wav")) < 500


@pytest.mark.parametrize("bits", [40, 48, 56, 64, 128])
def test_integers_of_other_widths(bits: int, tmp_path: Path) -> None:
    data = bytearray(SPEECH.read_bytes())
    data[34:36] = bits.to_bytes(2, "little")
    (tmp_path / "wide.wav").write_bytes(data)
    with pytest.raises(InvalidArgument, match=rf"wide\.wav: expected .* 8, 16, 24 or 32 bits, got {bits}"):
        load_wav(tmp_path / "wide.wav")


@pytest.mark.parametrize("rate", [1, 3_999, 384_001, 768_000])
def test_rates_that_are_none_of_sound(rate: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", np.zeros(10), rate=rate)
    with pytest.raises(InvalidArgument, match=f"expected 4000 to 384000 samples a second, got {rate}"):
        load_wav(path)


def test_features_are_those_of_transformers() -> None:
    want = json.loads((DATA / "real" / "whisper-base-f16.json").read_text(encoding="utf-8"))["mel"]
    features = log_mel(load_wav(SPEECH))
    assert features.shape == tuple(want["shape"][1:])
    assert features.dtype == np.float32
    np.testing.assert_allclose(features.mean(dtype=np.float64), want["mean"], atol=1e-6)
    np.testing.assert_allclose(features[:8, 0], want["first8_frame0"], atol=1e-5)


def test_features_by_the_book() -> None:
    """A few frames with sines and cosines written out."""
    samples = np.random.default_rng(0).standard_normal(16_000)
    got = log_mel(samples, mel_bins=128, frames=100)
    padded = np.pad(samples, 200, mode="reflect")
    n = np.arange(400)
    logs = []
    for frame in range(100):
        span = padded[160 * frame :][:400] * (0.5 - 0.5 * np.cos(2 * np.pi * n / 400))
        power = np.abs([np.sum(span * np.exp(-2j * np.pi * k * n / 400)) for k in range(201)]) ** 2
        logs.append(np.log10(np.maximum(power @ mel_filters(128), 1e-10)))
    want = np.array(logs).T
    np.testing.assert_allclose(got, (np.maximum(want, want.max() - 8) + 4) / 4, atol=1e-5)


def test_filters_have_equal_areas() -> None:
    for bins in (80, 128):
        filters = mel_filters(bins)
        assert filters.shape == (201, bins)
        assert (filters >= 0).all()
        assert (np.diff(filters.argmax(axis=0)) >= 0).all()
    np.testing.assert_allclose(mel_filters(80)[:, -20:].sum(axis=0) * 40, 1, atol=0.02)


@pytest.mark.parametrize("bad", [np.zeros((2, 2)), np.array([np.nan]), np.array([np.inf, 0])])
def test_samples_that_are_none(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="samples"):
        log_mel(bad)
