"""``sedd harness``."""

import sys

import typer

from sedd.cli.root import app


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def harness(context: typer.Context) -> None:
    """The Language Model Evaluation Harness with our models in it; all words go to its own command line, lm_eval.

    Example: `sedd harness --model sedd --model_args pretrained=run,draws=16 --tasks lambada_openai`, and
    `sedd harness ls tasks`. Log-probabilities of diffusion models are bounds. Needs `pip install 'sedd[harness]'`.
    """
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise ValueError("the harness is not installed; install it with: pip install 'sedd[harness]'") from None
    from sedd.evaluation import lm_eval as registered  # noqa: F401  its model puts itself into the harness's registry

    sys.argv = ["lm_eval", *context.args]
    cli_evaluate()
