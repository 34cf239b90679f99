"""The one door to mauve-text: how much of the room of human texts samples cover, in the features of the judge."""

from typing import Any, final

from sedd.evaluation.quality import samples as given
from sedd.evaluation.quality.judge import Judge, features
from sedd.evaluation.quality.samples import Samples
from sedd.extras import install_hint
from sedd.tokenizer import Ids

FEW = 100
"""Below so many texts on either side MAUVE says little."""


def _mauve() -> Any:
    try:
        import mauve
    except ImportError:
        raise ValueError(f"MAUVE needs the package mauve-text; install it: {install_hint('mauve')}") from None
    return mauve


@final
class Reference:
    """Texts that samples are held against, as the judge has them in mind; cut to its context where they are longer."""

    def __init__(self, texts: Samples, judge: Judge, batch: int = 8) -> None:
        _mauve()  # refused before the work is done
        if len(texts.rows) < 2:
            raise ValueError(f"{texts.source} holds one text; MAUVE compares laws, and wants {FEW} or more")
        self.source = texts.source
        self.features = features(judge, given.rows(texts, judge, truncate=True).ids, batch)

    def against(self, judge: Judge, rows: list[Ids], batch: int) -> dict[str, Any]:
        """MAUVE between 0 and 1, as the library computes it by default; nothing is downloaded."""
        if len(rows) < 2:
            raise ValueError(f"there is one sample; MAUVE compares laws, and wants {FEW} or more")
        ours = features(judge, rows, batch)
        found = _mauve().compute_mauve(p_features=ours, q_features=self.features, verbose=False)
        return {
            "mauve": round(float(found.mauve), 6),
            "mauve_reference": self.source,
            "mauve_texts": len(self.features),
            "mauve_buckets": int(found.num_buckets),
        }
