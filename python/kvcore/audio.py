"""Sound for speech models: from a WAV file to samples, and from these to log-mel features.

    samples   = WAV, channels averaged, at 16 kHz
    power     = |FFT of 25 ms under a Hann window, every 10 ms|^2
    mel       = power summed in triangles on the mel scale (Slaney's)
    features  = (max(log10 mel, its largest value - 8) + 4) / 4

Source: Whisper (Radford et al., 2022); the numbers are those of transformers' WhisperFeatureExtractor.
"""

from __future__ import annotations

import math
import wave
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidArgument

FloatArray = npt.NDArray[np.float32]

SAMPLE_RATE = 16_000
HOP = 160
"""Samples from one frame of features to the next."""

_FFT = 400
_WIDTHS = (1, 2, 3, 4)
_LEAST_RATE, _MOST_RATE = 4_000, 384_000
_ZERO_CROSSINGS = 24
_CHUNK = 1 << 15


def load_wav(path: str | Path) -> FloatArray:
    """The samples of a WAV file of integers (8, 16, 24 or 32 bits): float32 [samples] from -1 to 1 at 16 kHz.

    Several channels are averaged, other rates (4,000 to 384,000 Hz) are resampled.

    Raises:
        InvalidArgument: there is no such file, or it is no such WAV file, or there is no sound in it.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(file.getnframes())
    except OSError as error:
        raise InvalidArgument(f"{path}: expected a WAV file, got {error.strerror or error}") from error
    except (wave.Error, EOFError, RuntimeError, ValueError) as error:
        reason = str(error) or "a file that ends too early"
        raise InvalidArgument(f"{path}: expected a WAV file of integer samples, got {reason}") from error
    if width not in _WIDTHS:
        raise InvalidArgument(f"{path}: expected integer samples of 8, 16, 24 or 32 bits, got {8 * width}")
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise InvalidArgument(f"{path}: expected {_LEAST_RATE} to {_MOST_RATE} samples a second, got {rate}")
    whole = len(data) // (width * channels) * (width * channels)
    if not whole:
        raise InvalidArgument(f"{path}: expected at least one sample, got none")
    samples = _from_bytes(data[:whole], width).reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return resample(samples, rate)


def _from_bytes(data: bytes, width: int) -> FloatArray:
    raw: npt.NDArray[Any] = np.frombuffer(data, np.uint8)
    if width == 1:  # the only ones without a sign
        raw = raw ^ np.uint8(128)
    if width == 3:
        raw = np.pad(raw.reshape(-1, 3), ((0, 0), (1, 0))).reshape(-1)
    values = raw.view({1: "i1", 2: "<i2"}.get(width, "<i4"))
    samples: FloatArray = values.astype(np.float32) / np.float32(1 << (8 * values.itemsize - 1))
    return samples


def resample(samples: FloatArray, rate: int, to: int = SAMPLE_RATE) -> FloatArray:
    """Samples at another rate: a sinc under a Hann window, cut off below half of the lower rate.

    Args:
        samples: float32 [n] at ``rate`` samples a second.
        rate, to: samples a second.
    """
    if rate == to:
        return samples
    divisor = math.gcd(rate, to)
    up, down = to // divisor, rate // divisor
    cutoff = 0.97 * min(1.0, to / rate)
    half = math.ceil(_ZERO_CROSSINGS / cutoff)
    padded = np.pad(samples, (half, half + 1))
    steps, count = np.arange(1 - half, half + 1), math.ceil(len(samples) * to / rate)
    out = np.empty(count, np.float32)
    for start in range(0, count, _CHUNK):
        at = np.arange(start, min(start + _CHUNK, count), dtype=np.int64) * down
        whole, phase = at // up, (at % up) / up
        distance = steps[None] - phase[:, None]
        weights = np.sinc(cutoff * distance) * cutoff * np.cos(np.pi / 2 * np.clip(distance / half, -1, 1)) ** 2
        out[start : start + len(at)] = (weights * padded[whole[:, None] + steps[None] + half]).sum(axis=1)
    return out


def log_mel(samples: Any, mel_bins: int = 80, frames: int = 3000) -> FloatArray:
    """Whisper's features of a window of sound, which silence fills up.

    Args:
        samples: [n] at 16 kHz; what is beyond the window is left out.
        mel_bins: bands: 80, or 128 for large-v3.
        frames: of 10 ms; 3000 are the 30 seconds that Whisper takes.

    Returns:
        float32 [mel_bins, frames].

    Raises:
        InvalidArgument: samples of another shape, or that are no finite numbers.
    """
    samples = np.asarray(samples, np.float64)
    if samples.ndim != 1 or not np.isfinite(samples).all():
        raise InvalidArgument(f"samples: expected finite numbers [n], got shape {list(samples.shape)} or others")
    length = frames * HOP
    window = np.zeros(length)
    window[: min(len(samples), length)] = samples[:length]
    padded = np.pad(window, _FFT // 2, mode="reflect" if length > _FFT // 2 else "constant")
    spans = np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::HOP][:frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FFT) / _FFT)
    power = np.abs(np.fft.rfft(spans * hann)) ** 2
    mel = np.log10(np.maximum(power @ mel_filters(mel_bins), 1e-10))
    mel = (np.maximum(mel, mel.max() - 8.0) + 4.0) / 4.0
    return np.ascontiguousarray(mel.T, np.float32)


@lru_cache(maxsize=4)
def mel_filters(mel_bins: int) -> npt.NDArray[np.float64]:
    """Triangles of equal area from 0 to 8 kHz, float64 [frequencies, mel_bins]."""
    edges = _from_mel(np.linspace(0.0, _to_mel(SAMPLE_RATE / 2), mel_bins + 2))
    widths, frequencies = np.diff(edges), np.linspace(0, SAMPLE_RATE / 2, _FFT // 2 + 1)
    slopes = edges[None] - frequencies[:, None]
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    filters: npt.NDArray[np.float64] = triangles * (2.0 / (edges[2:] - edges[:-2]))
    return filters


# Slaney's scale: 200/3 Hz a step up to 1 kHz, from there 27 steps for each factor of 6.4.


def _to_mel(hertz: float) -> float:
    return 15 + math.log(hertz / 1000) * 27 / math.log(6.4) if hertz >= 1000 else hertz * 3 / 200


def _from_mel(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    hertz: npt.NDArray[np.float64] = np.where(
        mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * math.log(6.4) / 27)
    )
    return hertz
