"""Load judges: Hugging Face causal language models, GGUF files included, and autoregressive runs of sedd.

The judge of published tables is GPT-2 large: Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners".
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the conventional name)

from sedd.evaluation.quality.judge import Judge
from sedd.extras import install_hint
from sedd.hub import client
from sedd.loading import LoadedModel, load_model
from sedd.parameterization import CausalModel
from sedd.process import at_token
from sedd.tokenizer import Ids
from sedd.training import checkpoint


def load_judge(
    source: str, *, first_token: str | None = None, precision: str | None = None, device: str = "cpu"
) -> Judge:
    """Load a judge: a sedd run, a Hugging Face folder, a ``.gguf`` file, or the name of a model on the Hub.

    Args:
        first_token: Whether the first token of a text is ``skipped`` or ``scored``; by default Hugging Face models skip
            it and sedd runs score it.
        precision: Of its matrix products: float32, bfloat16 or, for a Hugging Face model, float64. None: float32 and,
            on a GPU, bfloat16 as its ``low_precision``.
    """
    path = Path(source)
    is_run = is_run_folder(path)
    if is_run and precision == "float64":
        raise ValueError(f"judge {source} is a sedd run and has no float64; choose float32 or bfloat16")
    if not path.exists() and (path.suffix == ".gguf" or source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ValueError(f"judge {source} does not exist; name a folder, a .gguf file, or a model on the Hub")
    skips_first_token = {"skipped": True, "scored": False}[first_token or ("scored" if is_run else "skipped")]

    def load(precision: str) -> Judge:
        if is_run:
            return SeddJudge(load_model(source, device=device, precision=precision), source, skips_first_token)
        return _load_hugging_face(source, skips_first_token, precision, device)

    judge = load(precision or "float32")
    if precision is None and device.startswith("cuda"):
        judge.low_precision = load("bfloat16")
    return judge


def is_run_folder(path: Path) -> bool:
    """Return whether a folder is a sedd run or one of its checkpoints."""
    return (path / checkpoint.CHECKPOINTS).is_dir() or (path / "ema.safetensors").is_file()


def _load_hugging_face(source: str, skips_first_token: bool, precision: str, device: str) -> "HuggingFaceJudge":
    """Load a folder, a ``.gguf`` file, or a model on the Hub, which is downloaded if it is not in the cache."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"this judge needs transformers; install it: {install_hint('judge')}") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = Path(source)
    location, options = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (source, {})
    try:
        location = location if path.exists() else str(client.download(source))
        tokenizer = transformers.AutoTokenizer.from_pretrained(location, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, precision), **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"judge {source} cannot be loaded; name the folder of a run, a Hugging Face folder, a .gguf file or a "
            f"model on the Hub. Error of transformers: {reason}"
        ) from None
    return HuggingFaceJudge(model.to(device), tokenizer, source, skips_first_token)


@final
class HuggingFaceJudge(Judge):
    """A causal language model and its tokenizer, as loaded by transformers."""

    def __init__(self, model: Any, tokenizer: Any, name: str, skips_first_token: bool = True) -> None:
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.name, self.skips_first_token = name, skips_first_token
        config = model.config.get_text_config()
        self.precision = str(next(model.parameters()).dtype).removeprefix("torch.")
        self.vocab_size = config.vocab_size
        lengths = [getattr(config, name, None) for name in ("max_position_embeddings", "n_ctx")]  # a GGUF file's: n_ctx
        self.context_length = min((length for length in lengths if length), default=None)
        self.sha256 = _sha256(model, tokenizer)
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if not skips_first_token and start is None:
            raise ValueError(f"judge {name} has no token that starts a text; use --first-token skipped")
        self._start = start

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int64) for ids in encoded]

    def decode(self, ids: ArrayLike) -> str:
        text: str = self.tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_nll(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        ids, mask = self._prepend_start(x, valid)
        logits = self.model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1].long(), use_cache=False).logits
        nll = [  # logits become float32 one row at a time, to save memory
            F.cross_entropy(row.float(), y, reduction="none") for row, y in zip(logits, ids[:, 1:], strict=True)
        ]
        return F.pad(torch.stack(nll), (int(self.skips_first_token), 0)).cpu()

    def features(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b h"]:
        ids, mask = self._prepend_start(x, valid)
        output = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False, output_hidden_states=True)
        hidden: Tensor = output.hidden_states[-1]
        return hidden[torch.arange(len(ids), device=hidden.device), mask.sum(-1) - 1]

    def _prepend_start(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask on the judge's device, after the beginning-of-text token if it is used."""
        if not self.skips_first_token:
            x, valid = F.pad(x, (1, 0), value=self._start), F.pad(valid, (1, 0), value=True)
        return x.to(self.model.device), valid.to(self.model.device)


def _sha256(model: Any, tokenizer: Any) -> str:
    """Hash the weights in the precision in which they are used, and the vocabulary."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for name, weights in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(weights.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@final
class SeddJudge(Judge):
    """A run with the autoregressive objective, whose −log p of a text is exact, as in `sedd score`.

    It has its own beginning-of-text token, so all tokens can be counted.
    """

    def __init__(self, loaded: LoadedModel, name: str, skips_first_token: bool = False) -> None:
        if not isinstance(loaded.model, CausalModel):
            objective = loaded.config.objective
            raise ValueError(f"judge {name} is a run of {objective}; a sedd run needs --objective autoregressive")
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.name, self.skips_first_token, self.precision = name, skips_first_token, loaded.precision
        self.vocab_size = loaded.tokenizer.vocab_size
        self.context_length: int = loaded.config.model.seq_len
        self.sha256 = hashlib.sha256(f"{loaded.sha256} {loaded.tokenizer.fingerprint()}".encode()).hexdigest()
        self._device, self._pad = loaded.device, loaded.learned_pad

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return self.tokenizer.encode_batch(texts)

    def decode(self, ids: ArrayLike) -> str:
        return self.tokenizer.decode(ids)

    def token_nll(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        length, pad = x.shape[-1], self._pad
        if pad is not None:
            extra = (0, self.context_length - length)
            x, valid = F.pad(torch.where(valid, x, pad), extra, value=pad), F.pad(valid, extra)
        x = x.to(self._device)
        nll = -at_token(self.model.log_next(x), x).cpu()
        if pad is not None:  # the padding of a record is part of its likelihood, and counts with its last token
            padding = torch.where(valid, 0, nll).sum(-1, keepdim=True)
            nll = nll.scatter_add(-1, valid.sum(-1, keepdim=True) - 1, padding)[:, :length]
        if self.skips_first_token:
            nll[:, 0] = 0
        return nll

    def features(self, x: Int[Tensor, "b L"], valid: Bool[Tensor, "b L"]) -> Float[Tensor, "b h"]:
        """Return the hidden state from which the token after the last one is predicted."""
        x = F.pad(x, (0, 1)).to(self._device)
        hidden = self.model.hidden(x, torch.zeros(len(x), device=self._device))
        return hidden[torch.arange(len(x)), valid.sum(-1)]
