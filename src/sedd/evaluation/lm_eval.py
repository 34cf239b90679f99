"""The model ``sedd`` of EleutherAI's Language Model Evaluation Harness (lm-eval).

The harness requests log-probabilities. Those of autoregressive models are exact. Those of diffusion models are **lower
bounds**, estimated with ``draws`` Monte Carlo draws, and so are the metrics computed from them: an accuracy compares
bounds, and a perplexity is an upper bound. The ``config`` section of the results states this, with the standard error.

A response depends on the seed and the request only: not on other requests, their order, or the batch size. The choices
of one question share their noise, which reduces the variance of their differences; different questions do not.

Reference: Gao et al. 2023, "A framework for few-shot language model evaluation", doi:10.5281/zenodo.10256836.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar, final

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from rich.console import Console
from rich.progress import track

from sedd import hub, samplers
from sedd.draws import derive_seed
from sedd.evaluation.continuation import encode_continuation, require_packed_text, score_continuation
from sedd.likelihood import LikelihoodEstimate, estimate_likelihood
from sedd.likelihood.estimate import build_estimator
from sedd.loading import LoadedModel
from sedd.runtime.distributed import Ranks
from sedd.samplers import Prompt, Warping

MAX_NEW_TOKENS = 256
"""Tokens to generate where a task sets no number (lm-eval's default), limited to half the model's sequence length."""

T = TypeVar("T")


@final
@register_model("sedd")
class SeddLM(LM):
    """A run or a model folder as a model of the harness: ``--model sedd --model_args pretrained=RUN,draws=16``."""

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
        """Load a model from the folder of a run or a model, by its name on the Hub, or as it was loaded.

        Args:
            steps: Sampling steps, for tasks that request samples.
            estimator: Likelihood estimator, as for ``sedd eval``.
            batch_size: Windows of a document that are scored at a time, each with all its draws.
        """
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size!r}; give a number of 1 or more, it changes no result")
        loaded = hub.from_pretrained(pretrained, device=_device(device)) if isinstance(pretrained, str) else pretrained
        require_packed_text(loaded)
        self.loaded, self.draws, self.seed, self.steps = loaded, draws, seed, steps
        self.batch, self.estimator_name = int(batch_size) * draws, estimator
        self.estimator = build_estimator(estimator, loaded.model, seed=seed)
        self.length = loaded.config.model.seq_len
        self._sum_of_variances, self._responses = 0.0, 0

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes next to its results."""
        return {
            "likelihood": "exact" if self.estimator.is_exact else "lower bound on the log-probability",
            "likelihood_estimator": type(self.estimator).__name__,
            "likelihood_stderr_nats": math.sqrt(self._sum_of_variances / max(1, self._responses)),
            "draws": 0 if self.estimator.is_exact else self.draws,
            "seed": self.seed,
            "model_parameters": sum(p.numel() for p in self.loaded.network.parameters()),
        }

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return, for each (context, continuation), log p(continuation | context) and whether it is greedy decoding."""
        return self._respond("loglikelihood", requests, self._continuation, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log p(text) for each (text,), in disjoint windows so that each token is scored once."""
        return self._respond("loglikelihood_rolling", requests, self._document, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return, for each (context, options), a continuation up to the first stop string."""
        repeats: Counter[str] = Counter()  # a repeated request gets another sample

        def generate_text(context: str, options: Mapping[str, Any]) -> str:
            key = repr((context, sorted(options.items())))
            repeats[key] += 1
            return self._generate(context, options, repeats[key] - 1)

        return self._respond("generate_until", requests, generate_text, disable_tqdm)

    def _respond(self, kind: str, requests: list[Instance], respond: Callable[..., T], quiet: bool) -> list[T]:
        console, responses = Console(stderr=True), []
        for request in track(requests, kind, console=console, transient=True, disable=quiet or not console.is_terminal):
            responses.append(respond(*request.args))
            self.cache_hook.add_partial(kind, request.args, responses[-1])
        return responses

    def _continuation(self, context: str, continuation: str) -> tuple[float, bool]:
        given, rest = encode_continuation(context, continuation, self.loaded)
        options: Any = {"estimator": self.estimator_name, "draws": self.draws, "batch": self.batch}
        found = score_continuation(given, rest, self.loaded, seed=derive_seed(self.seed, context), **options)
        greedy = samplers.decode_greedy(self.loaded, given, len(rest))
        return self._total(found, len(rest)), all(token == rest[position] for position, token in greedy)

    def _document(self, text: str) -> float:
        ids = self.loaded.tokenizer.encode(text)
        if not len(ids):
            return 0.0
        windows = [ids[i : i + self.length] for i in range(0, len(ids), self.length)]
        options: Any = {"draws": self.draws, "batch": self.batch, "ranks": Ranks(0, 1, self.loaded.device)}
        seed = derive_seed(self.seed, text)
        found = estimate_likelihood(self.loaded.model, self.estimator, windows, seed=seed, **options)
        return self._total(found, len(ids))

    def _generate(self, context: str, options: Mapping[str, Any], number: int) -> str:
        tokens, stops, warping = parse_generation_options(options, self.length)
        given = self.loaded.tokenizer.encode(context)
        given = given[max(0, len(given) - (self.length - tokens)) :]
        if warping is None:
            ids = [token for _, token in sorted(samplers.decode_greedy(self.loaded, given, tokens))]
        else:
            seed = derive_seed(self.seed, context)
            settings = samplers.SamplingSettings(steps=self.steps, seed=seed, **asdict(warping))
            row = torch.from_numpy(np.append(given, np.full(tokens, -1)))[None]
            prompt = Prompt(row.to(self.loaded.device))
            *_, last = samplers.SamplingRun.of(self.loaded, settings).states(prompt, first=number)
            ids = last.x[0, len(given) :].tolist()
        eos = self.loaded.tokenizer.eos
        text = self.loaded.tokenizer.decode(ids[: ids.index(eos)] if eos in ids else ids)
        return samplers.template.without_stop(text, stops)

    def _total(self, found: LikelihoodEstimate[float], tokens: int) -> float:
        """Return log p of all tokens, and count its variance."""
        self._sum_of_variances += (found.stderr * tokens) ** 2
        self._responses += 1
        return -found.nats * tokens


def parse_generation_options(options: Mapping[str, Any], length: int) -> tuple[int, tuple[str, ...], Warping | None]:
    """Return the number of tokens to generate, the stop strings, and the warping or None for greedy decoding."""
    remaining = dict(options)
    until = remaining.pop("until", None) or ()
    tokens = int(remaining.pop("max_gen_toks", min(MAX_NEW_TOKENS, max(1, length // 2))))
    if not 1 <= tokens <= length:
        raise ValueError(f"max_gen_toks is {tokens}; the model generates 1 to {length} tokens at once")
    do_sample = remaining.pop("do_sample", None)
    temperature = float(remaining.pop("temperature", 1.0 if do_sample else 0.0))
    top_p, top_k = float(remaining.pop("top_p", 1.0)), remaining.pop("top_k", None)
    if remaining:
        names = ", ".join(sorted(remaining))
        logging.getLogger("sedd").warning("generation option %s is not supported and ignored", names)
    sampled = do_sample is not False and temperature > 0
    stops = (until,) if isinstance(until, str) else tuple(stop for stop in until if stop)
    return tokens, stops, Warping(temperature, top_p, top_k or None) if sampled else None


def _device(name: str | None) -> str:
    """Return ``name`` or the default device; the harness passes ``cuda:0`` by default, even where there is no GPU."""
    if torch.cuda.is_available():
        return name or "cuda"
    return "cpu" if name is None or name.startswith("cuda") else name
