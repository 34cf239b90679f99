"""Read the facts of a model card, card.json, which `sedd info` shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final, get_type_hints

from sedd.schema import check_fields
from sedd.training import checkpoint

FACTS = "card"
"""The stem of the JSON file; it is not in the manifest, as it may be edited."""
RESULT_TYPES: Mapping[str, Any] = {
    "nats_per_token": float,
    "stderr_nats_per_token": float | None,
    "bits_per_char": float | None,
    **dict.fromkeys(("data", "dataset", "dtype", "protocol", "model"), str | None),
}
"""The types of the fields of a result that a card shows."""


@final
@dataclass(frozen=True)
class CardFacts:
    """What a model card states beyond what the configuration records; stored as card.json."""

    summary: str = ""  # what the model generates, in a sentence
    data: str = ""  # what it was trained on
    licence: str = ""  # of the data and of the weights
    command: str = ""  # the commands that made it
    limits: str = ""  # what it is not good for
    template: str = ""  # to fill, as an example of use
    results: list[dict[str, Any]] = field(default_factory=list)  # of `sedd eval`, or the validation bound of the run
    weights_cost: dict[str, Any] | None = None  # of storing the weights in a smaller dtype: `sedd export --eval`
    sample_metrics: dict[str, Any] | None = None  # of `sedd quality`
    samples: list[str] = field(default_factory=list)  # generated texts, not selected

    @property
    def temperature(self) -> float:
        """The temperature of its samples; 1 if they state none."""
        stated = (self.sample_metrics or {}).get("temperature")
        return float(stated) if isinstance(stated, int | float) and 0 < stated <= 100 else 1.0

    @staticmethod
    def read(folder: Path) -> "CardFacts":
        """Read the facts beside a model; without a file there are none."""
        if not (folder / f"{FACTS}.json").is_file():
            return CardFacts()
        where, stored = f"{folder / FACTS}.json", checkpoint.load_json(folder, FACTS)
        check_fields(where, stored, get_type_hints(CardFacts), closed=True)
        for record in (*stored.get("results", ()), *filter(None, [stored.get("weights_cost")])):
            check_fields(f"{where}, a result,", record, RESULT_TYPES, required=["nats_per_token"])
        return CardFacts(**stored)
