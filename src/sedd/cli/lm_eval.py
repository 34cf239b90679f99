"""``sedd lm-eval``."""

import sys

import typer

from sedd.cli import root
from sedd.extras import install_hint


@root.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run_lm_eval(context: typer.Context) -> None:
    """Run EleutherAI's Language Model Evaluation Harness (lm_eval) with the model type `sedd` registered.

    All arguments are passed on to lm_eval's own command line. Log-probabilities of diffusion models are lower bounds.
    Needs the extra `lm-eval`. Examples:

    - `sedd lm-eval --model sedd --model_args pretrained=run,draws=16 --tasks lambada_openai`
    - `sedd lm-eval ls tasks`
    """
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise ValueError(f"lm_eval is not installed; install it: {install_hint('lm-eval')}") from None
    from sedd.evaluation import lm_eval as registered  # noqa: F401  importing it registers the model type

    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()
