"""A judge, wherever it lies."""

from pathlib import Path

from sedd import factory
from sedd.evaluation.quality import judge_hf
from sedd.evaluation.quality.judge import Judge
from sedd.evaluation.quality.judge_sedd import Own

FIRST = {"skipped": True, "scored": False}
"""Whether a judge skips a text's first token."""
PRECISIONS = ("float32", "bfloat16", "float64")


def load(place: str, *, first: str | None = None, precision: str = "float32", device: str = "cpu") -> Judge:
    """A run of ours, a Hugging Face folder, a ``.gguf`` file, or a name on the Hub.

    ``first`` says what becomes of a text's first token: by default Hugging Face models skip it, ours count it.
    """
    if first is not None and first not in FIRST:
        raise ValueError(f"first-token is {first!r}; choose one of {', '.join(FIRST)}")
    if precision not in PRECISIONS:
        raise ValueError(f"judge-precision is {precision!r}; choose one of {', '.join(PRECISIONS)}")
    path = Path(place)
    if is_run(path):
        if precision != "float32":
            raise ValueError(f"judge {place} is a run of ours and judges in float32; leave out --judge-precision")
        return Own(factory.load(path, device=device), place, FIRST[first or "scored"])
    if not path.exists() and (path.suffix == ".gguf" or place.startswith((".", "/", "~")) or place.count("/") > 1):
        raise ValueError(f"judge {place} does not exist; name a folder, a .gguf file, or a model on the Hub")
    return judge_hf.load(place, skips_first=FIRST[first or "skipped"], precision=precision, device=device)


def is_run(path: Path) -> bool:
    """Whether a folder is a run of ours, or one of its checkpoints."""
    return (path / "checkpoints").is_dir() or (path / "ema.safetensors").is_file()
