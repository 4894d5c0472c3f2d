"""``python -m dspark.model_check``: check every model, one line each; status 1 when one does not hold."""

from __future__ import annotations

import sys
from time import process_time

from .checks import CHECKS
from .explore import explore


def main() -> int:
    """Print a line per check, with the counterexample where there is one."""
    failed = 0
    for name, make in CHECKS.items():
        started = process_time()
        report = explore(make())
        print(f"{name}\n  {report}, {process_time() - started:.1f} s", flush=True)
        failed += bool(report.broken)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
