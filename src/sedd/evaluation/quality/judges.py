"""Loading of judges by name."""

from pathlib import Path

from sedd.evaluation.quality import judge_hf
from sedd.evaluation.quality.judge import Judge
from sedd.evaluation.quality.judge_sedd import SeddJudge
from sedd.loading import load_model
from sedd.training import checkpoint

SKIPS_FIRST_TOKEN = {"skipped": True, "scored": False}
"""Values of ``--first-token``."""
PRECISIONS = ("float32", "bfloat16", "float64")


def load_judge(
    source: str, *, first_token: str | None = None, precision: str | None = None, device: str = "cpu"
) -> Judge:
    """Load a judge.

    Args:
        source: A sedd run, a Hugging Face folder, a ``.gguf`` file, or the name of a model on the Hub.
        first_token: Whether the first token of a text is ``skipped`` or ``scored``; by default Hugging Face models skip
            it and sedd runs score it.
        precision: Of its matrix products: float32, bfloat16 or, for a Hugging Face model, float64. None: float32 and,
            on a GPU, bfloat16 as its ``low_precision``.
    """
    if first_token is not None and first_token not in SKIPS_FIRST_TOKEN:
        raise ValueError(f"first-token is {first_token!r}; choose one of {', '.join(SKIPS_FIRST_TOKEN)}")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"judge-precision is {precision!r}; choose one of {', '.join(PRECISIONS)}")
    path = Path(source)
    is_run = is_run_folder(path)
    if is_run and precision == "float64":
        raise ValueError(f"judge {source} is a sedd run and has no float64; choose float32 or bfloat16")
    if not path.exists() and (path.suffix == ".gguf" or source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ValueError(f"judge {source} does not exist; name a folder, a .gguf file, or a model on the Hub")
    skips_first_token = SKIPS_FIRST_TOKEN[first_token or ("scored" if is_run else "skipped")]
    load = _load_run if is_run else judge_hf.load_hf_judge
    judge = load(source, skips_first_token=skips_first_token, precision=precision or "float32", device=device)
    if precision is None and device.startswith("cuda"):
        judge.low_precision = load(source, skips_first_token=skips_first_token, precision="bfloat16", device=device)
    return judge


def _load_run(source: str, *, skips_first_token: bool, precision: str, device: str) -> Judge:
    return SeddJudge(load_model(source, device=device, precision=precision), source, skips_first_token)


def is_run_folder(path: Path) -> bool:
    """Return whether a folder is a sedd run or one of its checkpoints."""
    return (path / checkpoint.CHECKPOINTS).is_dir() or (path / "ema.safetensors").is_file()
