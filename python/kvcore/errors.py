"""The exceptions of kvcore: one type per kind of failure, all of them a ``KvcoreError``.

Every message says what was expected and what came.
"""


class KvcoreError(Exception):
    """The base of every error that kvcore raises on purpose."""


class OutOfBlocks(KvcoreError):  # noqa: N818 - a public name
    """The pool has fewer free blocks than a plan needs; nothing was changed."""


class InvalidArgument(KvcoreError, ValueError):  # noqa: N818 - a public name
    """A value, a shape or a range that a call does not take."""


class InvalidHandle(KvcoreError, ValueError):  # noqa: N818 - a public name
    """A sequence that was freed, or that belongs to another cache."""


class StaleBatch(KvcoreError, RuntimeError):  # noqa: N818 - a public name
    """A batch that a newer plan, fork, truncate or free of one of its sequences has outdated."""


class InvalidState(KvcoreError, RuntimeError):  # noqa: N818 - a public name
    """A call that makes no sense now, such as writing a batch that was committed."""


class OutOfMemory(KvcoreError, MemoryError):  # noqa: N818 - a public name
    """The system did not give the memory that was asked for."""


class PinLimit(KvcoreError):  # noqa: N818 - a public name
    """A pin would take more than ``max_pinned_fraction`` of a pool; nothing was changed."""


class UnsupportedSimd(KvcoreError, RuntimeError):  # noqa: N818 - a public name
    """An instruction set was forced that this processor lacks."""


class CheckpointError(KvcoreError):
    """A model file or a saved cache that is bad, missing or not supported.

    The message names the file and the key or tensor."""


__all__ = [
    "CheckpointError",
    "InvalidArgument",
    "InvalidHandle",
    "InvalidState",
    "KvcoreError",
    "OutOfBlocks",
    "OutOfMemory",
    "PinLimit",
    "StaleBatch",
    "UnsupportedSimd",
]
