"""Errors that a user can mend: the command line prints them as one line and ends with status 2."""

from __future__ import annotations


class UserError(ValueError):
    """Configuration or files are not what they must be; the text names the field and the remedy."""
