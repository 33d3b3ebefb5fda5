"""Messages: a frozen dataclass for the request of each task, and one for its answer.

Every field is validated against its type on arrival, with every engine. Requests with unknown
fields are rejected; unknown fields of an answer are dropped and counted, so that newer clients can
work with older servers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Interval, Len
from pydantic import PlainValidator, Strict, ValidationInfo

from firm.base.registry import Registry
from firm.base.sanitize import printable
from firm.federation.option import OPTIONS, Option
from firm.federation.schema import (
    Invalid,
    Metrics,
    Model,
    Parameters,
    Reading,
    Text,
    context,
    fields_of,
    invalid,
    read,
    read_fields,
    read_record,
    shown,
)

MAX_ROUND = 10**9
"""Upper bound on the rounds of a run."""
MAX_CLIENTS = 10**6
"""Upper bound on the clients of a federation."""
MAX_EXAMPLES = 10**9
"""Upper bound on the examples of a client."""
Count = Annotated[int, Interval(ge=0, le=MAX_ROUND)]
Steps = Annotated[int, Interval(ge=1, le=MAX_ROUND)]
Examples = Annotated[int, Interval(ge=1, le=MAX_EXAMPLES)]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a client's work, from which example answers are generated to plan a run."""

    num_columns: int
    """Columns of a Jacobian in an example answer; its bytes are scaled to the true number."""
    num_passes: int
    """Optimizer steps of one local training."""
    metrics: dict[str, Any]
    """Metrics that the clients report for one training."""


@dataclass(frozen=True)
class Message:
    """A message between a server and a client; each field is typed by its annotation.

    Attributes:
        column_fields: Names of the fields whose tensors grow with a Jacobian's columns.
    """

    column_fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, content: Any, reading: Reading) -> Self:
        """Returns the validated message, from an instance or a mapping of its fields.

        The names of dropped fields are added to ``reading.dropped``.

        Raises:
            Invalid: When a field is missing, unknown, or has the wrong type.
        """
        values = vars(content) if isinstance(content, cls) else content
        if not isinstance(values, Mapping):
            raise invalid(f"of type {cls.__name__}", content, at="the message")
        kinds, required = fields_of(cls)
        message = cls(**read_fields(kinds, values, reading, required=required))
        message.check(reading)
        return message

    def check(self, reading: Reading) -> None:
        """Raises ``Invalid`` if fields are inconsistent with each other."""


@dataclass(frozen=True)
class Answer(Message):
    """A client's answer to a request; unknown fields are dropped and counted."""

    @classmethod
    def read(cls, content: Any, reading: Reading) -> Self:
        """Returns the validated answer; see ``Message``."""
        if isinstance(content, Mapping):
            known, _ = fields_of(cls)
            strangers = [name for name in content if name not in known]
            reading.dropped.extend(printable(name, max_length=40) for name in strangers)
            content = {name: content[name] for name in content if name in known}
        return super().read(content, reading)


@dataclass(frozen=True, kw_only=True)
class Request(Message):
    """A server's request to clients, each of which receives only its own part.

    Attributes:
        task: Name of the registered task that handles the request; no code is sent.
        answer: Type of the answer.
        tells_of_data: Whether an answer reveals new information about a client's data.
    """

    task: ClassVar[str]
    answer: ClassVar[type[Answer]]
    tells_of_data: ClassVar[bool] = True

    round: Steps
    """Current round, from 1."""
    objectives: Annotated[tuple[Text, ...], Strict(False), Len(1, 100)]
    """Names of the M objectives, in order."""
    adapter: Model
    """θ_t."""
    accepted: Annotated[dict[Text, Count], Len(0, MAX_CLIENTS)] = field(default_factory=dict)
    """Last round with an accepted update, by client; clients without one are absent."""
    rate: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Factor of the clients' learning rates in this round."""

    @property
    def num_trainings(self) -> int:
        """Number of local trainings requested, each of which returns an adapter."""
        return 0

    def parameter_bytes(self, num_parameters: int, adapter_bytes: int) -> int:
        """Returns the bytes of parameters in an answer, given the adapter's number and bytes."""
        return self.num_trainings * adapter_bytes

    @property
    def takes_whole_batches(self) -> bool:
        """True if the gradients of a whole batch are needed, in addition to its minibatches'."""
        return False

    def num_solves(self, num_passes: int) -> int:
        """Returns how often a client solves for weights in ``num_passes`` optimizer steps."""
        return 0

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns an example answer of realistic size, with the adapter of the request."""
        raise NotImplementedError(f"{type(self).__name__} must implement example.")

    def of(self, *clients: str) -> Self:
        """Returns the request for some clients, without information about the others."""
        accepted = {name: self.accepted[name] for name in clients if name in self.accepted}
        return replace(self, accepted=accepted)

    def to_network(self, *clients: str) -> Self:
        """Returns the request in the form sent over the network to some clients."""
        return self.of(*clients)

    def received(self, content: Any, client: str) -> Any:
        """Returns a validated answer in the form that the server uses; by default unchanged.

        Raises:
            Invalid: When the answer does not have the required form.
        """
        return content

    def reading(self) -> Reading:
        """Returns the context in which an answer is validated."""
        return Reading(self.objectives, self.adapter)


ENVELOPE = ("round", "objectives", "adapter", "accepted", "rate")
"""Fields of every request that the server sets in each round."""


SENT_FORMS: Registry[str, type] = Registry(
    "sent form",
    {
        "partial": "firm.federation.options.ranks",
        "quantized": "firm.federation.options.quantized",
    },
)
"""Dataclasses with one field that options send instead of an adapter, by the field's name."""


def sent_form(kind: type) -> type:
    """Registers a dataclass with one field that an option sends instead of an adapter.

    Raises:
        ValueError: The field's name is taken.
    """
    (form,) = fields(kind)
    return SENT_FORMS.add(form.name, kind)


def _sent_parameters(value: Any, info: ValidationInfo) -> Any:
    if type(value) in SENT_FORMS.values():
        value = vars(value)
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, content),) = value.items()
        if name in SENT_FORMS:
            kinds, _ = fields_of(SENT_FORMS[name])
            return SENT_FORMS[name](read(kinds[name], content, "", context(info)))
    return read(Parameters, value, "", context(info))


SentParameters = Annotated[Any, PlainValidator(_sent_parameters)]
"""θ_c with the names, shapes and dtypes of θ_t, or a form that an option sends instead."""


def _options(value: Any, info: ValidationInfo) -> dict[str, Option]:
    if not isinstance(value, Mapping):
        raise invalid("a mapping", value)
    for key in value:
        if key not in OPTIONS:
            raise Invalid(f" has the unknown option {shown(key)}")
    return {
        key: read_record(OPTIONS[key], item, f".{key}", context(info))
        for key, item in value.items()
    }


OptionsByKey = Annotated[dict[str, Any], PlainValidator(_options)]
"""Options of a request: registered ones, by key, in the order of application."""


@dataclass(frozen=True)
class Update(Answer):
    """The answer to a local training."""

    client: Text
    adapter: SentParameters
    """θ_c: an ``Adapter``, or in transit a registered form (``sent_form``)."""
    num_examples: Examples
    """Size of the client's shard."""
    metrics: Metrics
    """Registered metrics of the local training."""
