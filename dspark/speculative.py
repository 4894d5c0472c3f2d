"""`--speculative-config`: what to draft with and how deep, in the form that vLLM users write.

    {"method": "dspark", "num_speculative_tokens": 5}

Fields: `method` ("dspark"), `model` (a drafter directory; the shipped drafter when the embedded target is served),
`num_speculative_tokens` (default: the drafter's block size; 0 serves the target alone and then nothing else of the
drafter is read, loaded or validated), `rejection_sample_method` ("block", the default, judges a proposal as a whole and
accepts more; "standard" judges token by token; both are exact), and two of our own: `draft_temperature` (null follows
the request) and `draft_support` (entries of a sampled q row: 16, 32, 64, 256, or "dense" for the whole draft
vocabulary; null takes 32, and 256 where the draft temperature is so high that 32 entries would lose acceptance).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.models import drafter_config
from dspark.models.config import DecoderConfig, ModelConfigError
from dspark.models.drafter_config import DrafterConfig
from dspark.models.source import EMBEDDED
from dspark_proto import SupportPolicy

SHIPPED_DRAFTER = Path(__file__).parent / "checkpoints" / "smollm2-135m-instruct"

# Acceptance per width is measured by `dspark bench acceptance`: at low temperatures 32 entries hold nearly all of it.
USUAL_SUPPORT, WIDE_SUPPORT, WIDE_TEMPERATURE = 32, 256, 0.85
DENSE = int(SupportPolicy.DENSE)


RejectionMethod = Literal["standard", "block"]


class SpeculativeConfig(BaseModel):
    """The parsed flag. Unknown fields are refused: a typo must not silently turn speculation off."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["dspark"]
    model: str | None = Field(default=None, min_length=1)
    num_speculative_tokens: int | None = Field(default=None, ge=0, le=drafter_config.MAX_BLOCK)
    draft_temperature: float | None = Field(default=None, ge=0.0, le=4.0)
    draft_support: Literal[16, 32, 64, 256, "dense"] | None = None
    rejection_sample_method: RejectionMethod = "block"

    @property
    def enabled(self) -> bool:
        return self.num_speculative_tokens != 0


@dataclass(frozen=True, slots=True)
class ResolvedDrafter:
    """A drafter that fits the target: its directory, its config, and the depth to draft to.

    draft_support: entries of a sampled row, 0 (`DENSE`) for rows over the whole vocabulary, None as it needs.
    """

    directory: Path
    config: DrafterConfig
    depth: int
    draft_temperature: float | None
    draft_support: int | None
    rejection_sample_method: RejectionMethod = "block"

    @property
    def max_support(self) -> int:
        """Entries of the widest sparse row that a request may ask for."""
        return self.draft_support or WIDE_SUPPORT

    @property
    def dense(self) -> bool:
        """Whether sampled rows are dense, for which both sides need memory."""
        return self.draft_support == DENSE

    def support(self, temperature: float) -> int:
        """Entries per row at a draft temperature: one for greedy drafting, else as configured or as it needs."""
        if temperature == 0:
            return 1
        if self.draft_support is not None:
            return self.draft_support
        return WIDE_SUPPORT if temperature >= WIDE_TEMPERATURE else USUAL_SUPPORT


def parse(text: str) -> SpeculativeConfig:
    """Parse the JSON text of the flag. Raises ModelConfigError that names the field."""
    try:
        return SpeculativeConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the JSON"
        raise ModelConfigError(f"--speculative-config: {field}: {first['msg']}") from None


def resolve(speculative: SpeculativeConfig, target_name: str, target: DecoderConfig) -> ResolvedDrafter | None:
    """Find the drafter and check it against the target; None when speculation is off (nothing is read then)."""
    if not speculative.enabled:
        return None
    if speculative.model is None and target_name != EMBEDDED:
        raise ModelConfigError(
            "--speculative-config: model: no drafter ships for this target: give a drafter directory "
            "(train one with `dspark train`), or num_speculative_tokens 0"
        )
    directory = Path(speculative.model).expanduser() if speculative.model else SHIPPED_DRAFTER
    config = drafter_config.read(directory)
    config.check_target(target)
    depth = speculative.num_speculative_tokens or config.block_size
    if depth > config.block_size:
        raise ModelConfigError(
            f"--speculative-config: num_speculative_tokens {depth} is larger than the drafter's block_size "
            f"{config.block_size}: a block drafter's positions collapse past its trained block"
        )
    return ResolvedDrafter(
        directory,
        config,
        depth,
        speculative.draft_temperature,
        DENSE if speculative.draft_support == "dense" else speculative.draft_support,
        speculative.rejection_sample_method,
    )
