"""The proof that speculation changes no distribution: what ``dspark prove`` runs, and what the tests import.

Tiers 0 and 1 import ``dspark`` alone. ``served_pair`` and what uses it start a worker, an engine and an endpoint: they
are part of the composition root and import the roles when they run, not before.
"""
