"""dspark: speculative decoding with the drafter on another machine, and the output distribution kept exact."""

__version__ = "0.1.0"
