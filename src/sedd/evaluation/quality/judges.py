"""Loading of judges by name."""

from pathlib import Path

from sedd import factory
from sedd.evaluation.quality import judge_hf
from sedd.evaluation.quality.judge import Judge
from sedd.evaluation.quality.judge_sedd import SeddJudge

SKIPS_FIRST_TOKEN = {"skipped": True, "scored": False}
"""Values of ``--first-token``."""
PRECISIONS = ("float32", "bfloat16", "float64")


def load_judge(
    source: str, *, first_token: str | None = None, precision: str = "float32", device: str = "cpu"
) -> Judge:
    """Load a judge.

    Args:
        source: A sedd run, a Hugging Face folder, a ``.gguf`` file, or the name of a model on the Hub.
        first_token: Whether the first token of a text is ``skipped`` or ``scored``; by default Hugging Face models skip
            it and sedd runs score it.
        precision: Of a Hugging Face model.
        device: Device of the judge.
    """
    if first_token is not None and first_token not in SKIPS_FIRST_TOKEN:
        raise ValueError(f"first-token is {first_token!r}; choose one of {', '.join(SKIPS_FIRST_TOKEN)}")
    if precision not in PRECISIONS:
        raise ValueError(f"judge-precision is {precision!r}; choose one of {', '.join(PRECISIONS)}")
    path = Path(source)
    if is_run_folder(path):
        if precision != "float32":
            raise ValueError(f"judge {source} is a sedd run and judges in float32; leave out --judge-precision")
        return SeddJudge(factory.load_model(path, device=device), source, SKIPS_FIRST_TOKEN[first_token or "scored"])
    if not path.exists() and (path.suffix == ".gguf" or source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ValueError(f"judge {source} does not exist; name a folder, a .gguf file, or a model on the Hub")
    skips_first_token = SKIPS_FIRST_TOKEN[first_token or "skipped"]
    return judge_hf.load_hf_judge(source, skips_first_token=skips_first_token, precision=precision, device=device)


def is_run_folder(path: Path) -> bool:
    """Return whether a folder is a sedd run or one of its checkpoints."""
    return (path / "checkpoints").is_dir() or (path / "ema.safetensors").is_file()
