"""How much memory there is, and how much of it the process may still take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_UNKNOWN = 2 << 30

_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Where containers say what they may have, and what they have."""


def available_memory() -> int:
    """Bytes that can be allocated without swapping: what the system has left, or its container's limit."""
    limits = [_system_memory()]
    for limit, usage in _LIMITS:
        try:
            limits.append(max(int(Path(limit).read_text()) - int(Path(usage).read_text()), 0))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return min(limits)


def total_memory() -> int | None:
    """Bytes that nobody can have more of here: memory and swap, or the container's limit. None if it is not known."""
    total = sum(_meminfo(name) or 0 for name in ("MemTotal", "SwapTotal"))
    if not total and sys.platform != "win32":
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            return None
    limits = [total] if total else []
    for limit, _ in _LIMITS:
        try:
            limits.append(int(Path(limit).read_text()))
        except (OSError, ValueError):  # as above
            continue
    return min(limits, default=None)


def _meminfo(name: str) -> int | None:
    """What Linux says of its memory, in bytes; None elsewhere."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _system_memory() -> int:
    available = _meminfo("MemAvailable")
    if available is not None:
        return available
    if sys.platform == "win32":
        return _windows_memory()
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS tells the total only
    except (ValueError, OSError):
        return _UNKNOWN


def _windows_memory() -> int:
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "available", "a", "b", "c", "d", "e")),
        ]

    status = Status()
    status.length = ctypes.sizeof(Status)
    kernel32 = getattr(ctypes, "windll").kernel32  # noqa: B009 - exists on Windows only
    return int(status.available) if kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else _UNKNOWN
