"""The whole zoo: every deliberate mistake by name, and other code that must not be taken for one.

Purpose: a mutant is ``PRODUCTION`` with one part replaced. It says what the mistake is and whether the law of the first
token alone would show it; the suite measures both.

Called by ``prove`` and by tests.

Sources: design notes of shipped systems and papers, see each mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dspark.proof import block_steps, edited_toys, lanes, shard_steps, zoo
from dspark.proof.admission_laws import (
    A_CURVE,
    Memory,
    budget_of_this_round,
    global_argmax,
    later_slots_first,
    peek_at_the_first,
)
from dspark.proof.subject import PRODUCTION, Subject
from dspark.proof.worker_steps import (
    drawn_again_when_unlikely,
    from_finer_counts,
    in_order_of_probability,
    padding_is_not_read,
    zero_counts_pass,
)


@dataclass(frozen=True)
class Mutant:
    """Fields:
    name: what `--plant` takes.
    bug: the mistake in words.
    part: the field of ``Subject`` that is replaced.
    by_marginals: whether the law of the first token alone differs; None where no law is compared.
    make: the subject, new each time, because a mistake may have a memory.
    serves: whether the mistake can also be planted into a running engine.
    """

    name: str
    bug: str
    part: str
    by_marginals: bool | None
    make: Callable[[], Subject]
    serves: bool = False


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-").replace(",", "")


def _mutant(
    part: str, name: str, bug: str, by_marginals: bool | None, value: object, *, serves: bool = False
) -> Mutant:
    def make() -> Subject:
        return replace(PRODUCTION, **{part: value})  # type: ignore[arg-type]

    return Mutant(_slug(name), bug, part, by_marginals, make, serves)


# name: (mistake, seen by the first token, can be planted into an engine)
_RATIO: dict[str, tuple[str, bool, bool]] = {
    "residual from p": ("after a rejection the target itself is sampled, not max(p - q, 0)", True, True),
    "correction on the support of q only": ("the residual forgets tokens that q cannot draft", True, True),
    "correction from q": ("after a rejection the drafter's row is sampled", True, True),
    "correction from absolute difference": ("|p - q| instead of (p - q)+", True, True),
    "correction from p without x": ("the correction of one-entry rows behind the acceptance p/q", True, True),
    "correction row off by one": ("the residual of the next position's target row", True, False),
    "correction reuses the acceptance coin": ("one number decides the rejection and the correction", True, True),
    "correction reuses the proposal number": ("the correction knows the number that drew x", True, False),
    "acceptance reuses the proposal number": ("the coin knows the number that drew x", True, False),
    "one acceptance coin for all positions": ("the coin of the first draft decides on all of them", False, True),
    "accept on equality": ("<= instead of <: a token of no target mass passes a coin of 0", True, False),
    "accept with p before top-k": ("acceptance looks at the unprocessed target row", False, False),
    "accept with q over p": ("the ratio upside down", True, True),
    "accept with the next target row": ("logits row i + 1 judges draft i", True, False),
    "accept half as often": ("the coin is doubled, the residual is not", True, True),
    "accept above a threshold": ("typical acceptance: p(x) >= 0.3", True, True),
    "accept always": ("drafts are not judged", True, True),
    "bonus from q": ("the last token of a fully accepted round comes from the drafter", False, False),
    "bonus row off by one": ("the bonus is sampled from the row of the last draft", False, False),
    "row at another draft temperature": ("the verifier believes in q squared", True, True),
    "row not conditioned on the drafted predecessor": ("q of the backbone without its Markov head", False, False),
    "row with an entry dropped and renormalised": ("a row is repaired on its way", True, True),
    "admission looks at the drafted token": ("drafts are kept only when they start with token 0", True, True),
    "discard by the length of the reply": ("late replies are dropped, and long ones are late", False, False),
}
_EDITED = {
    "penalties not advanced over drafts": ("row i counts the committed tokens alone", False),
    "grammar mask of the row before": ("row i has the state of row i - 1", False),
    "bonus row without edits": ("the last row of a block is not edited", False),
    "prompt left out of the repetition penalty": ("only generated ids are penalised", True),
}
# name: (mistake, seen by the first token)
_BLOCK = {
    "block weight is not capped": ("a draft that q underrates pays for more than itself", False),
    "block weight from the next target row": ("row i + 1 weighs draft i", True),
    "block prefixes tried from the shortest": ("the first refusal ends the round, as in token verification", True),
    "block prefix kept with its weight": ("the chance of the whole proposal for every prefix", True),
    "one number for all prefixes of a block": ("the number that refused the whole decides on its parts", True),
    "block correction of token verification": ("max(p - q, 0), as if the prefix had its full weight", False),
    "block correction without the weight of its prefix": ("p - w q instead of w p - q", False),
    "block correction from p": ("after a cut the target itself is sampled", True),
}
_MATCH = {
    "match lane redraws after a rejection": "a rejected draft is followed by a second sample of p",
    "match lane excludes x with the number that rejected it": "p without x, drawn with the number that was not x",
}
_GREEDY = {
    "greedy lane accepts the second best": ("a tolerance at temperature 0", True),
    "greedy row off by one": ("argmax of the row before", False),
}
_SHARDS = {
    "residual on one shard only": ("the other shards' part of the residual is forgotten", True),
    "shard chosen by a float": ("FP64 sums of 2**60 tickets choose the shard", True),
    "shard without mass can be chosen": ("<= where the strict test belongs", True),
}


def _all() -> list[Mutant]:
    found = [
        _mutant("ratio", name, bug, seen, zoo.MUTANTS[name], serves=serves)
        for name, (bug, seen, serves) in _RATIO.items()
    ]
    for name, (bug, seen) in _EDITED.items():
        found.append(_mutant("edited", name, bug, seen, edited_toys.with_rows(edited_toys.ROW_MUTANTS[name])))
    found.append(
        Mutant(
            "no-rollback-after-a-rejection", "the state of rejected drafts stays", "edited", True,
            lambda: replace(PRODUCTION, edited=edited_toys.without_rollback()),
        )
    )  # fmt: skip
    found += [
        _mutant("block", name, bug, seen, block_steps.BLOCK_MUTANTS[name]) for name, (bug, seen) in _BLOCK.items()
    ]
    found += [_mutant("match", name, bug, True, lanes.MATCH_MUTANTS[name]) for name, bug in _MATCH.items()]
    found += [_mutant("greedy", name, bug, seen, lanes.GREEDY_MUTANTS[name]) for name, (bug, seen) in _GREEDY.items()]
    found += [
        _mutant("sharded", name, bug, seen, shard_steps.SHARD_MUTANTS[name]) for name, (bug, seen) in _SHARDS.items()
    ]
    return [*found, *_admission(), *_worker()]


def _admission() -> list[Mutant]:
    return [
        _mutant("admission", "admission by global argmax",
                "the best throughput anywhere, c_2 decides on x_1 (DSpark appendix A)", True, global_argmax(A_CURVE)),
        _mutant("admission", "admission by a later confidence", "x_1 is kept when c_2 is high", True,
                peek_at_the_first),
        _mutant("shared", "ties go to later slots", "at c = 1 the number of drafts tells the draft", True,
                later_slots_first),
        _mutant("shared", "budget from the confidences of this round", "the budget looks at what it admits", True,
                budget_of_this_round),
        _mutant("memory", "position-only keys with stale confidences",
                "drafts thrown away last round admit the same drafts now", False, Memory(same_numbers=True)),
    ]  # fmt: skip


def _worker() -> list[Mutant]:
    return [
        _mutant("drawn", "draw from unrounded logits", "the token is not drawn from the declared counts", True,
                from_finer_counts),
        _mutant("drawn", "retry draws again", "an unlikely draft is drafted a second time", True,
                drawn_again_when_unlikely),
        _mutant("read_sparse", "entry of zero count accepted", "a draft with q = 0 passes as certain", None,
                zero_counts_pass),
        _mutant("read_dense", "dense padding accepted", "mass beyond the vocabulary is not looked at", None,
                padding_is_not_read),
    ]  # fmt: skip


def _equivalents() -> list[Mutant]:
    found = [_mutant("ratio", name, "same law", None, step) for name, step in zoo.EQUIVALENTS.items()]
    found += [_mutant("block", name, "same law", None, step) for name, step in block_steps.BLOCK_EQUIVALENTS.items()]
    found += [_mutant("match", name, "same law", None, step) for name, step in lanes.MATCH_EQUIVALENTS.items()]
    found += [_mutant("sharded", name, "same law", None, step) for name, step in shard_steps.SHARD_EQUIVALENTS.items()]
    found.append(_mutant("memory", "position-only keys at a fixed depth", "nobody looks at old drafts", None,
                         Memory(same_numbers=True, stale_rule=False)))  # fmt: skip
    found.append(_mutant("memory", "fresh keys at a fixed depth", "same law", None, Memory(stale_rule=False)))
    found.append(_mutant("drawn", "draw in order of probability", "other tokens, same law", None,
                         in_order_of_probability))  # fmt: skip
    return found


MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in _all()}
EQUIVALENTS: dict[str, Mutant] = {other.name: other for other in _equivalents()}
"""Same law by construction; a suite that flags one of them measures something else than the law."""
