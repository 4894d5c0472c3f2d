"""What is asked: cases whose answer is one text, and cases whose answer has a law.

A greedy request, and one of the match lane with a fixed seed, have one right text whatever happens to the workers. A
ratio request depends on the rounds in which it was drafted, so its first tokens are judged by their law instead: four
tokens behind `LAW_PROMPT` at temperature 1, of which the first three are counted.

Called by `load` and `judge`. Draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LAW_PROMPT = (3, 14, 15, 92, 65, 35)
LAW_TOKENS, LAW_TOP_K, LAW_SEED = 3, 3, 1_000_000

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "Give me a simple recipe for vegetable soup.",
    "How does a bicycle stay upright when it is moving?",
    "Describe the water cycle step by step.",
    "What is the difference between a star and a planet?",
    "List five things to see in an old harbour town.",
    "Repeat after me: one, two, three, one, two, three, one, two, three.",
)


class Lane(StrEnum):
    """How a case's answer is judged."""

    GREEDY = "greedy"
    MATCH = "match"
    LAW = "law"


@dataclass(frozen=True)
class Case:
    """One request. chat: the prompt is a user's message; else it is completed as it stands."""

    key: str
    lane: Lane
    prompt: str | tuple[int, ...]
    max_tokens: int
    seed: int = 0
    chat: bool = False

    def body(self) -> dict[str, object]:
        """Fields beside prompt, model and stream. End-of-text is ignored, so that lengths are the same."""
        sampling: dict[str, object] = {"temperature": 0.0}
        extra: dict[str, object] = {"ignore_eos": True, "dspark_token_origins": True}
        if self.lane is Lane.MATCH:
            sampling = {"temperature": 1.0, "seed": self.seed}
            extra["dspark_lane"] = "match"
        elif self.lane is Lane.LAW:
            sampling = {"temperature": 1.0, "seed": self.seed}
            extra["top_k"] = LAW_TOP_K
        return {"max_tokens": self.max_tokens, **sampling, "extra_body": extra}


def fixed_cases(max_tokens: int) -> list[Case]:
    """Cases with one right text: every prompt greedily, every prompt in the match lane, half of them as a chat."""
    cases = []
    for number, prompt in enumerate(PROMPTS):
        chat = number % 2 == 1
        cases.append(Case(f"greedy-{number}", Lane.GREEDY, prompt, max_tokens, chat=chat))
        cases.append(Case(f"match-{number}", Lane.MATCH, prompt, max_tokens, seed=7 + number, chat=chat))
    return cases


def law_case(number: int) -> Case:
    """The `number`-th request that is judged by law; every one has a seed of its own."""
    return Case("law", Lane.LAW, LAW_PROMPT, LAW_TOKENS + 1, seed=LAW_SEED + number)
