"""Tiny models that tests build; they are those of ``dspark prove``."""

from dspark.proof.tiny_pair import *  # noqa: F403
