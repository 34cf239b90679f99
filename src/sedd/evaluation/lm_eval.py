"""The door to the Language Model Evaluation Harness: the model ``sedd``.

The harness asks for log-probabilities. Those of autoregressive models are exact. Those of diffusion models are **lower
bounds** on the log-probability, estimated by ``draws`` looks, and whatever the harness makes of them is of bounds: an
accuracy compares bounds, a perplexity is at most what it says. Its results say so in their ``config``, with the error.

An answer is a function of the seed and of the request: no other request, no order and no batch size changes it. The
choices of one question meet the same noise, so that less of their difference is luck; other questions meet their own.
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, final

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from rich.console import Console
from rich.progress import track

from sedd import evaluation, factory, generate
from sedd.factory import LoadedModel
from sedd.likelihood import Terms, estimate
from sedd.runtime.distributed import Ranks
from sedd.sampling import Prompt, Warping

LONGEST = 256
"""Tokens that are generated where a task does not say: the harness's own number, or half of what the model reads."""

T = TypeVar("T")


@final
@register_model("sedd")
class Sedd(LM):
    """A run or a model folder, as the harness asks it: ``--model sedd --model_args pretrained=RUN,draws=16``."""

    def __init__(
        self,
        pretrained: str | LoadedModel,
        draws: int = 16,
        seed: int = 0,
        steps: int = 128,
        estimator: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """``batch_size`` windows of a document are scored at a time, each with all its ``draws``.

        ``steps`` are of generation where a task asks for samples; ``estimator`` is as for ``sedd eval``.
        """
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size!r}; give a number of 1 or more, it changes no result")
        loaded = factory.load(pretrained, device=_usable(device)) if isinstance(pretrained, str) else pretrained
        evaluation.running(loaded)
        self.loaded, self.draws, self.seed, self.steps = loaded, draws, seed, steps
        self.batch, self.name = int(batch_size) * draws, estimator
        self.by = factory.estimator(estimator, loaded, Terms._fields, seed=seed)
        self._squares, self._answers = 0.0, 0

    @property
    def length(self) -> int:
        """Tokens that the model reads at once."""
        return self.loaded.config.model.seq_len

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        return {
            "likelihood": "exact" if self.by.is_exact else "lower bound on the log-probability",
            "likelihood_estimator": type(self.by).__name__,
            "likelihood_stderr_nats": math.sqrt(self._squares / max(1, self._answers)),
            "draws": 0 if self.by.is_exact else self.draws,
            "seed": self.seed,
            "model_parameters": sum(p.numel() for p in self.loaded.network.parameters()),
        }

    # What the harness asks ---------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation) a bound on log p(continuation | context), and whether it is greedy."""
        return list(self._answered("loglikelihood", requests, self._after, disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """For each (text,) a bound on log p(text): disjoint windows, so that each token is scored once."""
        return list(self._answered("loglikelihood_rolling", requests, self._whole, disable_tqdm))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """For each (context, options) what comes behind the context, up to the first stop string."""
        seen: Counter[str] = Counter()  # a request that is repeated asks for another sample

        def text(context: str, options: Mapping[str, Any]) -> str:
            key = repr((context, sorted(options.items())))
            seen[key] += 1
            return self._generated(context, Wanted.read(options, self.length), seen[key] - 1)

        return list(self._answered("generate_until", requests, text, disable_tqdm))

    def _answered(self, kind: str, requests: list[Instance], answer: Any, quiet: bool) -> Iterator[Any]:
        for request in _watched(requests, kind, quiet):
            found = answer(*request.args)
            self.cache_hook.add_partial(kind, request.args, found)
            yield found

    # Answers -----------------------------------------------------------------------------------------------

    def _after(self, context: str, continuation: str) -> tuple[float, bool]:
        given, rest = evaluation.split(context, continuation, self.loaded)
        found = evaluation.after(
            given,
            rest,
            self.loaded,
            estimator=self.name,
            draws=self.draws,
            seed=self._seed_of(context),
            batch=self.batch,
        )
        self._note(found.stderr * len(rest))
        is_greedy = all(token == rest[place] for place, token in generate.greedy(self.loaded, given, len(rest)))
        return -found.nats * len(rest), is_greedy

    def _whole(self, text: str) -> float:
        ids = self.loaded.tokenizer.encode(text)
        if not len(ids):
            return 0.0
        windows = [ids[i : i + self.length] for i in range(0, len(ids), self.length)]
        here, seed = Ranks(0, 1, self.loaded.device), self._seed_of(text)
        found = estimate(self.loaded.model, self.by, windows, draws=self.draws, seed=seed, batch=self.batch, ranks=here)
        self._note(found.stderr * len(ids))
        return -found.nats * len(ids)

    def _generated(self, context: str, wanted: "Wanted", number: int) -> str:
        room = self.length - wanted.tokens
        given = self.loaded.tokenizer.encode(context)
        given = given[max(0, len(given) - room) :]
        if wanted.warping is None:
            ids = [token for _, token in sorted(generate.greedy(self.loaded, given, wanted.tokens))]
        else:
            settings = generate.SamplingSettings(
                steps=self.steps, seed=self._seed_of(context), **asdict(wanted.warping)
            )
            job = generate.SamplingRun(self.loaded.model, self.loaded.process, self.loaded.schedule, settings)
            row = torch.from_numpy(np.append(given, np.full(wanted.tokens, -1)))[None]
            *_, last = job.states(Prompt(row.to(self.loaded.device)), first=number)
            ids = last.x[0, len(given) :].tolist()
        eos = self.loaded.tokenizer.eos
        return wanted.cut(self.loaded.tokenizer.decode(ids[: ids.index(eos)] if eos in ids else ids))

    def _seed_of(self, text: str) -> int:
        """A seed of the text's own."""
        digest = hashlib.blake2b(f"{self.seed}\n{text}".encode("utf-8", "surrogatepass"), digest_size=8)
        return int.from_bytes(digest.digest()) >> 1

    def _note(self, stderr: float) -> None:
        self._squares, self._answers = self._squares + stderr**2, self._answers + 1


@final
@dataclass(frozen=True)
class Wanted:
    """What a task asks of a generation."""

    tokens: int
    stops: tuple[str, ...]
    warping: Warping | None
    """None: the likeliest tokens, nothing drawn."""

    @classmethod
    def read(cls, options: Mapping[str, Any], length: int) -> "Wanted":
        """The harness's options; those that mean nothing here are named in the log."""
        left = dict(options)
        until = left.pop("until", None) or ()
        tokens = int(left.pop("max_gen_toks", min(LONGEST, max(1, length // 2))))
        if not 1 <= tokens <= length:
            raise ValueError(f"max_gen_toks is {tokens}; the model fills 1 to {length} tokens at once")
        drawn = left.pop("do_sample", None)
        temperature = float(left.pop("temperature", 1.0 if drawn else 0.0))
        top_p, top_k = float(left.pop("top_p", 1.0)), left.pop("top_k", None)
        if left:
            logging.getLogger("sedd").warning("generation has no option %s; left out", ", ".join(sorted(left)))
        sampled = drawn is not False and temperature > 0
        stops = (until,) if isinstance(until, str) else tuple(stop for stop in until if stop)
        return cls(tokens, stops, Warping(temperature, top_p, top_k or None) if sampled else None)

    def cut(self, text: str) -> str:
        """``text`` up to the first stop string."""
        return text[: min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=len(text))]


def _usable(device: str | None) -> str:
    """A GPU where there is one: the harness's command line names the first, whatever the machine has."""
    if torch.cuda.is_available():
        return device or "cuda"
    return "cpu" if device is None or device.startswith("cuda") else device


def _watched(items: Iterable[T], label: str, quiet: bool) -> Iterable[T]:
    console = Console(stderr=True)
    return track(items, label, console=console, transient=True, disable=quiet or not console.is_terminal)
