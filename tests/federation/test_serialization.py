import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from firm.federation import Update
from firm.federation.serialization import (
    _DTYPES,
    MAX_TEXT_BYTES,
    decode,
    encode,
    pack,
    packed_size,
    unpack,
)

ADAPTER = {"b": torch.tensor([[1.5, -0.0], [torch.pi, 1e-42]]), "a": torch.zeros(2).bfloat16()}


def test_a_message_arrives_as_it_was_sent(same):
    moments = {0: {"step": torch.tensor(3.0)}, 1: {}}
    message = {"round": 3, "adapter": ADAPTER, "moments": moments, "p": (0.5, None, True, "é")}
    assert same(unpack(pack(message)), message)
    assert unpack(pack({"x": [float("inf"), 0.1]})) == {"x": [float("inf"), 0.1]}


def test_a_message_travels_as_its_fields(same):
    update = Update("client_1", ADAPTER, 7, {"weights": [[0.25, 0.75]]})
    assert same(unpack(pack([update]))[0], vars(update))


def test_views_travel_as_what_they_show(same):
    matrix = torch.arange(6.0).view(2, 3)
    assert same(unpack(pack(matrix.T)), matrix.T)
    assert len(pack(matrix[:, :1])) < len(pack(matrix))


def test_more_parameters_cost_their_own_bytes():
    small = Update("a", {"x": torch.zeros(1000)}, 5, {"weights": [[0.5, 0.5]]})
    large = Update("a", {"x": torch.zeros(3000)}, 5, {"weights": [[0.5, 0.5]]})
    assert abs(len(pack(large)) - len(pack(small)) - 8000) < 16  # the header's digits and padding
    told = Update("a", {"x": torch.zeros(1000)}, 5, {"weights": [[0.5, 0.5]] * 2})
    assert len(pack(told)) - len(pack(small)) == len(",[,]") + 2 * 24


@pytest.mark.parametrize("value", [0.1, 1e-320, -2.2250738585072014e-308, 1 / 3, 12345.0])
def test_the_size_of_a_message_does_not_depend_on_the_digits_of_its_floats(value):
    message = {"seconds": {"rollout": value, "update": [value, 7]}}
    packed = pack(message)
    assert len(packed) == len(pack({"seconds": {"rollout": 0.5, "update": [2.25, 7]}}))
    assert unpack(packed) == message


DTYPES = [
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
SHAPES = st.lists(st.integers(0, 12), max_size=3)
TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=12)


@given(TENSORS)
def test_a_size_is_that_of_the_packed_tensors(tensors):
    message = [torch.zeros(shape).to(dtype) for dtype, shape in tensors]
    assert packed_size(message) == len(pack(message))


def test_sizes_know_every_dtype_in_the_order_of_safetensors():
    tensors = [torch.zeros(1).to(dtype) for dtype in DTYPES]
    assert packed_size(tensors) == len(pack(tensors))
    header = save({str(dtype): torch.zeros(1).to(dtype) for dtype in DTYPES})[8:]
    names, _ = json.JSONDecoder().raw_decode(header.decode("latin-1"))
    assert list(names) == [str(dtype) for dtype in reversed(_DTYPES)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(JSON)
def test_a_size_is_that_of_the_packed_text(content):
    assert packed_size(content) == len(pack(content))
    message = Update("client_1", ADAPTER, 7, {"content": content})
    assert packed_size(message) == len(pack(message))


def test_what_is_encoded_is_json_and_comes_back(same):
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode({"adapter": ADAPTER, 3: "three"}, "state", tensors)
    assert same(decode(json.loads(json.dumps(encoded)), tensors), {"adapter": ADAPTER, 3: "three"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [object()]}, r"message\['a'\]\[0\] is a object; a state holds"),
        ({1.5: 0}, r"message has the key 1.5; use strings or integers"),
        (torch.eye(2).to_sparse(), "message is a torch.sparse_coo tensor; make it dense"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(value, message):
    with pytest.raises(ValueError, match=message):
        pack(value)
    with pytest.raises(ValueError, match=message):
        packed_size(value)


def test_a_message_of_another_party_has_texts_as_keys_and_a_bounded_size():
    """Integers that are equal modulo 2⁶¹ - 1 collide as keys, and reading would be quadratic."""
    colliding = {number * (2**61 - 1): 0 for number in range(10)}
    packed = pack(colliding)
    assert unpack(packed) == colliding
    with pytest.raises(ValueError, match="unknown tag 'items'"):
        unpack(packed, max_bytes=10_000)
    with pytest.raises(ValueError, match="more than 100 in all"):
        unpack(pack({"text": "x" * 200}), max_bytes=100)
    long = pack({"text": "x" * (MAX_TEXT_BYTES + 1)})
    with pytest.raises(ValueError, match=f"{MAX_TEXT_BYTES} of text"):
        unpack(long, max_bytes=2 * len(long))


def test_what_came_is_told_in_a_line_that_a_terminal_can_show():
    text = b'{"\\u001b[2J\\n": 1}'
    with pytest.raises(ValueError, match="unknown tag") as refused:
        unpack(len(text).to_bytes(8, "big") + text + pack({})[8 + len(b'{"dict":{}}') :])
    assert str(refused.value).isprintable()
