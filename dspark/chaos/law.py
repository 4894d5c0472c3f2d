"""Whether the first tokens of the ratio lane, under faults, still follow the target's exact law.

The law comes from the target alone (`proof.target_law`: no engine, no drafter, no batch); counts are compared with a
chi-square test at `ALPHA`. Called by `run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.chaos.catalogue import LAW_PROMPT, LAW_TOKENS, LAW_TOP_K
from dspark.chaos.client import Answer

ALPHA = 1e-6
Law = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class LawOutcome:
    """Of `samples` texts. p is None when there were too few for a test; `impossible` names a text that cannot come."""

    samples: int
    statistic: float | None = None
    df: int | None = None
    p: float | None = None
    impossible: str | None = None

    @property
    def broken(self) -> bool:
        """The texts do not follow the law."""
        return self.impossible is not None or (self.p is not None and self.p <= ALPHA)


def exact_law(target: str) -> Law:
    """Joint law of the first tokens behind `LAW_PROMPT`. Loads the target into this process."""
    from dspark.processors import SamplingPolicy
    from dspark.proof.target_law import Sampling, target_law

    return target_law(Path(target), LAW_PROMPT, Sampling(SamplingPolicy(1.0, top_k=LAW_TOP_K)), LAW_TOKENS)


def judge_law(answers: Sequence[Answer], law: Law) -> LawOutcome:
    """Compare the texts of finished answers with the law."""
    from dspark.proof.chi_square import ImpossibleError, chi_square, merged_cells

    counts = Counter(tuple(answer.ids[:LAW_TOKENS]) for answer in answers)
    try:
        outcome = chi_square([merged_cells(counts, law)])  # type: ignore[arg-type]
    except ImpossibleError as error:
        return LawOutcome(len(answers), impossible=str(error))
    except ValueError:
        return LawOutcome(len(answers))
    return LawOutcome(len(answers), outcome.statistic, outcome.df, outcome.p)
