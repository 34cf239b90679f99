"""Requests of the HTTP interface; unknown fields are refused."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

OptionValue = Annotated[int, Field(ge=0, le=10_000)] | Annotated[float, Field(ge=0, le=10_000)] | str
Text = Annotated[str, Field(max_length=2**20)]
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=1024)]
MOST_STOPS, LONGEST_STOP = 4, 1024


def _check_stops(given: str | list[str] | None) -> str | list[str] | None:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MOST_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
        raise ValueError(f"give up to {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
    return given


MOST_FIELDS = 64  # fields of an object: each that is wrong becomes an error of its own, and they take time and memory


class Body(BaseModel):
    """A JSON object. Types are strict: `false` is no integer; 8.0 is one, as in JSON Schema."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, record: object) -> object:
        """Reject objects of too many fields, and turn whole numbers into integers."""
        if not isinstance(record, dict):
            return record
        for fields in (record, *record.values()):
            if isinstance(fields, dict) and len(fields) > MOST_FIELDS:
                raise ValueError(f"an object has {len(fields)} fields; at most {MOST_FIELDS} are allowed")
        whole = [name for name, x in record.items() if isinstance(x, float) and x.is_integer() and abs(x) < 2**63]
        return record | {name: int(record[name]) for name in whole}


class Request(Body):
    """What requests to the model share."""

    model: str | None = Field(None, description="The id of the model, as `/v1/models` lists it; may be left out.")
    timeout: float | None = Field(None, gt=0, le=86_400, description="Seconds for the reply; by default the server's.")
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="The same seed gives the same reply, up to rounding; by default it is random."
    )
    label: str | None = Field(None, description="Condition on this label, for a model trained with labels.")


class Sampling(Request):
    """How to sample: as `sedd sample` does, with the same defaults."""

    n: int = Field(1, ge=1, le=1024, description="Replies per prompt or template.")
    steps: Annotated[int, Field(ge=1, le=2**20)] | Literal["inf"] | None = Field(
        None, description="Sampling steps, by default 128; inf reveals one token at a time."
    )
    sampler: str | None = Field(None, description="The sampler; by default the model's.")
    options: dict[str, OptionValue] = Field({}, description="Options of the sampler.")
    grid: str = Field("uniform", max_length=2**16, description="Time grid: uniform, cosine, or times from 1 down to 0.")
    temperature: float = Field(1.0, ge=0, le=100, description="Of the clean token's distribution; 0: the likeliest.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int | None = Field(None, ge=1, le=2**31, description="Draw from the k most probable tokens only.")
    guidance: float = Field(1.0, ge=0, le=1000, description="Classifier-free guidance weight.")
    stream: bool = Field(False, description="Send text as server-sent events as soon as it is final.")
    diffusing: bool = Field(False, description="Send every edit as server-sent events: start, step, end; or error.")
    details: bool = Field(False, description="With diffusing: entropy and likely tokens of every edit; slower.")


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = Field(False, description="End the stream with an event that holds the usage.")


class CompletionRequest(Sampling):
    """`POST /v1/completions`: text after a prompt, or between a prompt and a suffix."""

    prompt: Texts = Field("", description="Text before the tokens to fill, or several of them.")
    suffix: Text | None = Field(None, description="Text after the tokens to fill.")
    max_tokens: int = Field(
        16,
        ge=1,
        le=2**20,
        description="Tokens of the text; without a suffix, a model of padded records may draw fewer.",
    )
    stop: Annotated[str | list[str] | None, AfterValidator(_check_stops)] = Field(
        None, description="Up to four strings that end the text: what is before the first of them is returned."
    )
    echo: bool = Field(False, description="Return the prompt before the completion.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=5,
        description="Return the log-probability of each token when it was drawn, and of so many others. They add up to "
        "log p of the text only if one token was drawn per step. Absorbing noise only.",
    )
    stream_options: StreamOptions | None = Field(None, description="Options of a stream, as OpenAI's.")
    best_of: int | None = Field(None, ge=1, le=1024, description="OpenAI's: only `n` or 1, as texts are not ranked.")
    presence_penalty: float | None = Field(None, ge=0, le=0, description="OpenAI's: only 0.")
    frequency_penalty: float | None = Field(None, ge=0, le=0, description="OpenAI's: only 0.")
    logit_bias: dict[str, float] | None = Field(None, max_length=0, description="OpenAI's: only empty.")
    user: str | None = Field(None, description="OpenAI's; it is ignored.")
    metadata: dict[str, str] | None = Field(None, description="OpenAI's; it is ignored.")
    store: bool | None = Field(None, description="OpenAI's; nothing is stored.")


class InfillRequest(Sampling):
    """`POST /v1/infill`: texts with gaps anywhere."""

    template: Texts = Field(description="A text in which {8} is a gap of eight tokens, or several of them.")


class ScoreRequest(Request):
    """`POST /v1/score`: a bound on −log p of texts."""

    text: Texts = Field(description="A text, or several of them.")
    given: Text = Field("", description="Text before each of them, on which the probability is conditioned.")
    draws: int | None = Field(None, ge=2, le=2**20, description="Monte Carlo draws per text, even; by default 128.")
    estimator: str | None = Field(None, description="As for `sedd score`; by default the variational bound.")


class TokenizeRequest(Body):
    """`POST /v1/tokenize`: the tokens of a text."""

    text: Text = Field(description="The text.")
