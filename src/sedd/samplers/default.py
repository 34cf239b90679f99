"""The sampler that suits a model."""

from typing import Any

from sedd.parameterization import CausalModel, HiddenStateDenoiser
from sedd.samplers.autoregressive import LeftToRight
from sedd.samplers.base import Sampler
from sedd.samplers.first_hitting import FirstHitting
from sedd.samplers.grid import Ancestral, Tweedie
from sedd.samplers.wrapper import base_model


def default_sampler(model: Any) -> Sampler:
    """Return first-hitting for a denoiser of masks, ancestral for other denoisers, and Tweedie for scores."""
    model = base_model(model)
    if isinstance(model, CausalModel):
        return LeftToRight()
    if not isinstance(model, HiddenStateDenoiser):
        return Tweedie()
    return FirstHitting() if model.process.only_masks else Ancestral()
