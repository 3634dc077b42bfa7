"""What fusedops raises and warns with, beside ValueError for a caller's mistake."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """The call is sound, but the chosen backend (or every backend) cannot serve it; the message has every reason."""


class FallbackWarning(UserWarning):
    """A slower backend than expected runs; given once per reason."""
