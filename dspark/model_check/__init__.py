"""Exhaustive checks of the slot ledger and of its traces: small models that run the production connections."""
