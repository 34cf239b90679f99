"""The sampler that suits a model."""

from typing import Any

from sedd.diffusion.parameterization import CausalModel, HiddenStateDenoiser
from sedd.sampling.autoregressive import LeftToRight
from sedd.sampling.base import Sampler
from sedd.sampling.first_hitting import FirstHitting
from sedd.sampling.grid import Ancestral, Tweedie
from sedd.sampling.wrapper import base_model


def default_sampler(model: Any) -> Sampler:
    """Return first-hitting for a denoiser of masks, ancestral for other denoisers, and Tweedie for scores."""
    model = base_model(model)
    if isinstance(model, CausalModel):
        return LeftToRight()
    if not isinstance(model, HiddenStateDenoiser):
        return Tweedie()
    return FirstHitting() if model.process.only_masks else Ancestral()
