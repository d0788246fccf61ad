"""How much memory the process may still take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_UNKNOWN = 2 << 30


def available_memory() -> int:
    """Bytes that can be allocated without swapping: what the system has left, or its container's limit."""
    limits = [_system_memory()]
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limits.append(max(int(Path(limit).read_text()) - int(Path(usage).read_text()), 0))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return min(limits)


def _system_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
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
