"""The exceptions that kvcore raises."""


class KvcoreError(Exception):
    """Base of every error that kvcore raises on purpose."""


class InvalidArgument(KvcoreError, ValueError):  # noqa: N818
    """A value that cannot be used; the message says what was expected and what came."""


class CheckpointError(KvcoreError):
    """A model file that is missing, damaged or not supported; the message names it."""
