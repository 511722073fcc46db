"""Any value round-trips through MessagePack; malicious data is rejected."""

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium.spaces import GraphInstance
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp
from scripted_env import Lazy, bits, duplicate, spoil

from gym_trace.data.packing import pack, pack_lenient, unpack
from gym_trace.data.returns import number_of
from gym_trace.data.tensors import RawArray
from gym_trace.data.values import ABSENT, EnumMember, Misfit, Unstored, copied, distinct, is_plain_dtype, objects
from gym_trace.errors import CorruptTrace, UnstorableValue

dtypes = st.one_of(
    stnp.boolean_dtypes(),
    stnp.integer_dtypes(endianness="="),
    stnp.unsigned_integer_dtypes(endianness=">"),
    stnp.floating_dtypes(endianness="="),
    stnp.floating_dtypes(endianness=">", sizes=(16, 32, 64)),
    stnp.complex_number_dtypes(endianness="="),
    stnp.unicode_string_dtypes(max_len=5),
    stnp.byte_string_dtypes(max_len=5),
    stnp.datetime64_dtypes(),
    stnp.timedelta64_dtypes(),
)
arrays = stnp.arrays(dtypes, stnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
texts = st.text(st.characters())  # lone surrogates among them
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(), st.complex_numbers(), texts,
    st.binary(), arrays.filter(lambda array: array.size > 0).map(lambda array: array.flat[0]),
)  # fmt: skip
masked_arrays = st.tuples(arrays, st.booleans(), st.randoms(use_true_random=False)).map(
    lambda drawn: np.ma.MaskedArray(
        drawn[0], np.array([drawn[2].random() < 0.5 for _ in range(drawn[0].size)], bool).reshape(drawn[0].shape)
        if drawn[1] else np.ma.nomask,
    )
)  # fmt: skip
records = stnp.arrays(np.dtype([("a", "<i2"), ("b", "<f8", (2,))]), stnp.array_shapes(min_dims=0, max_dims=2))
keys = st.one_of(texts, st.integers(-(2**70), 2**70), st.none(), st.booleans(), st.tuples(st.integers(), texts))
values = st.recursive(
    st.one_of(scalars, arrays, masked_arrays, records),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.lists(children, max_size=3).map(lambda items: objects(items)),
        st.tuples(children, children, children).map(lambda parts: GraphInstance(*parts)),
    ),
    max_leaves=8,
)


@given(values)
def test_values_round_trip(value: Any) -> None:
    assert bits(unpack(pack(value))) == bits(stored(value))
    packed, remarks = pack_lenient(value)
    assert (bits(unpack(packed)), remarks) == (bits(stored(value)), [])


def stored(value: Any) -> Any:
    """Return value with records in the form that they come back."""
    if isinstance(value, (np.ndarray, np.void)) and value.dtype.names and not isinstance(value, np.ma.MaskedArray):
        return RawArray(str(value.dtype), np.frombuffer(value.tobytes(), np.uint8).reshape(*value.shape, 18))
    if isinstance(value, np.ndarray) and value.dtype == object:
        return objects([stored(item) for item in value.ravel().tolist()]).reshape(value.shape)
    if isinstance(value, GraphInstance):
        return GraphInstance(*map(stored, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(stored, value))
    return {key: stored(item) for key, item in value.items()} if isinstance(value, dict) else value


@given(values)
def test_a_copy_shares_no_memory_with_its_original(value: Any) -> None:
    value = unpack(pack(value))  # as a trace has it
    original = duplicate(value)
    before = bits(original)
    copy = copied(original)
    spoil(original)
    assert bits(copy) == before


@pytest.mark.parametrize(
    "value",
    [
        np.str_(""), np.bytes_(b""), np.array(["", ""]), np.zeros((0, 3), np.float16), np.zeros((2, 0), ">i4"),
        np.array(None), np.array([[None, [1]], [{}, ()]], object), np.datetime64("NaT", "s"), np.longdouble(1) / 3,
        np.clongdouble(1 + 2j), -0.0, [[]], ((),), {}, 2**63, 2**64, -(2**63) - 1, -(2**64), {2**64: {2**65: [2**66]}},
        ABSENT, Misfit([1, (2,)]), Unstored("a.B", "<b>"), "\ud800\udfff", "\x00",
        GraphInstance(np.zeros((1, 2)), None, None),
    ],
    ids=repr,
)  # fmt: skip
def test_edge_cases_round_trip(value: Any) -> None:
    assert bits(unpack(pack(value))) == bits(value)


class Colour(enum.IntEnum):
    RED = 2**80


class Name(str):
    pass


class Word(str, enum.Enum):
    RED = "red"

    def __str__(self) -> str:
        return "not the value"


class Odometer(float):
    def __float__(self) -> float:
        return -1.0


def test_values_of_a_subclass_come_back_as_their_base_class() -> None:
    point = collections.namedtuple("point", "x y")
    given_values = [
        Colour.RED, Name("n"), collections.OrderedDict(a=1), collections.defaultdict(list, b=[2]), point(1, 2),
        np.zeros((1, 2)).view(np.recarray), collections.Counter("aa"), bytearray(b"x"), type("L", (list,), {})([1]),
        Word.RED, Odometer(2.5), memoryview(b"y"),
        np.array(["a", "bc"], getattr(np.dtypes, "StringDType", lambda: object)()),
    ]  # fmt: skip
    expected = [2**80, "n", {"a": 1}, {"b": [2]}, (1, 2), np.zeros((1, 2)), {"a": 2}, b"x", [1]]
    expected += ["red", 2.5, b"y", np.array(["a", "bc"], object)]
    assert bits(unpack(pack(given_values))) == bits(expected)


class Thing:
    def __init__(self) -> None:
        self.loop = self

    def __repr__(self) -> str:
        return "<thing>" * 1000


UNSTORABLE = [
    Thing(), {1, 2}, datetime.datetime(2026, 11, 21), print, Thing, np.zeros(2, [("a", object)]),
    np.ma.zeros(2, [("a", int)]), range(3), np.array([Thing()], object), iter([]),
]  # fmt: skip


@pytest.mark.parametrize("value", UNSTORABLE, ids=lambda value: type(value).__name__)
def test_an_unstorable_value_raises_with_its_type(value: Any) -> None:
    for wrapped in (value, [value], {"key": (1, value)}):
        with pytest.raises(UnstorableValue, match="cannot be stored") as caught:
            pack(wrapped)
        assert "\n" not in str(caught.value)


@given(st.dictionaries(keys, scalars, max_size=40))
def test_maps_of_scalars_are_packed_like_any_other_map(value: dict[Any, Any]) -> None:
    items = [part for item in value.items() for part in map(pack, item)]
    (head,) = msgpack.packb([None] * len(value))[:1] if len(value) < 16 else [0]
    whole = pack(value)
    assert whole.endswith(b"".join(items))
    assert bits(unpack(whole)) == bits(value)
    assert len(value) >= 16 or whole[0] == head - 0x10


@pytest.mark.parametrize("value", UNSTORABLE, ids=lambda value: type(value).__name__)
def test_lenient_packing_replaces_only_the_unstorable_parts(value: Any) -> None:
    packed, replaced = pack_lenient({"good": np.float32(1), "bad": [value, 2]})
    found = unpack(packed)
    assert bits(found["good"]) == bits(np.float32(1))
    assert found["bad"][1] == 2
    assert len(replaced) == 1
    placeholder = found["bad"][0]
    if isinstance(placeholder, np.ndarray):
        (placeholder,) = placeholder
    assert isinstance(placeholder, Unstored)
    assert len(placeholder.text) <= 1000


class Listed(enum.Enum):
    SOME = [1, 2]  # noqa: RUF012


class Rights(enum.Flag):
    READ, WRITE = 1, 2


@pytest.mark.parametrize("member", [Listed.SOME, Rights.READ, Rights.READ | Rights.WRITE, Rights(0)], ids=str)
def test_members_of_enums_come_back_as_class_name_and_value(member: Any) -> None:
    expected = EnumMember(f"{__name__}.{type(member).__name__}", member.name, member.value)
    assert unpack(pack([member])) == [expected]
    assert unpack(pack(expected)) == copied(expected) == expected
    if type(member.value) is list:
        with pytest.raises(UnstorableValue):  # not a valid key after reading
            pack({member: 1})
    else:
        assert unpack(pack({member: 1})) == {expected: 1}


def test_a_value_that_contains_itself_raises() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnstorableValue):
        pack(loop)
    packed, replaced = pack_lenient({"loop": loop})
    assert replaced
    unpack(packed)
    deep: Any = None
    for _ in range(5000):
        deep = (deep,)
    with pytest.raises(UnstorableValue):
        pack(deep)
    unpack(pack_lenient(deep)[0])


class Tensor:
    """Hashable like a tensor, but stored as an array, which is not hashable."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.zeros(2)


class FrozenDict(dict):  # type: ignore[type-arg]
    def __hash__(self) -> int:  # type: ignore[override]
        return 1


@pytest.mark.parametrize(
    "key", [frozenset([1]), Tensor(), (1, Tensor()), FrozenDict(a=1)], ids=["set", "tensor", "tuple", "dict"]
)
def test_an_unstorable_key_gives_one_warning_and_raises_when_strict(key: Any) -> None:
    packed, remarks = pack_lenient({"a": 1, "b": [{key: 2}]})
    assert len(remarks) == 1
    unpack(packed)
    with pytest.raises(UnstorableValue):
        pack({"a": {key: 2}})


class Rude(collections.UserDict):  # type: ignore[type-arg]
    def keys(self) -> Any:
        raise RuntimeError("not now")


class RudeNumber:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    __float__ = __getattr__


def test_lenient_packing_never_raises() -> None:
    for value in (Rude(a=1), RudeNumber(), 10**5000, {10**5000: -(10**5000)}, fractions.Fraction(1, 3)):
        for wrapped in (value, [value], {"key": (1, value)}, np.full(2, None, object)):
            if isinstance(wrapped, np.ndarray):
                wrapped[0] = value
            unpack(pack_lenient(wrapped)[0])


def test_a_value_known_only_to_its_package_is_not_a_number() -> None:
    for value in (RudeNumber(), fractions.Fraction(1), decimal.Decimal(1), "1", None, [1.0], np.zeros(1), 1j, {}):
        assert math.isnan(number_of(value))
    for value in (True, 1, 1.0, np.float32(1), np.array(1), Lazy(1), Lazy(np.uint8(1))):
        assert number_of(value) == 1
    assert number_of(-(10**400)) == -math.inf


def nested(code: int, *payload: Any) -> bytes:
    packed: bytes = msgpack.packb(msgpack.ExtType(code, b"".join(payload)))
    return packed


ARRAY = msgpack.ExtType(1, msgpack.packb(["<f4", [1], b"abcd"]))
HOSTILE = [
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 100_000,
    msgpack.packb(1) + b"\0",
    nested(1, msgpack.packb(["<f4", [1 << 40], b"abcd"])),
    nested(1, msgpack.packb(["<f4", [3], b"abcd"])),
    nested(1, msgpack.packb(["|O", [1], b"abcdefgh"])),
    nested(1, msgpack.packb(["<f4,<f4", [1], b"abcdefgh"])),
    nested(1, msgpack.packb(["<U999999999", [1], b""])),
    nested(1, msgpack.packb(["<U999999999", [0], b""])),
    nested(1, msgpack.packb("x")),
    nested(2, msgpack.packb(["<f8", b"123"])),
    nested(2, msgpack.packb(["(1000000,1000000)f8", b"12345678"])),
    nested(4, b"\x01"),
    nested(5, msgpack.packb([1])),
    nested(6, b"123"),
    nested(7, msgpack.packb([[1 << 40], [None]])),
    nested(7, msgpack.packb([[2, -1], [1, 2, 3]])),
    nested(8, msgpack.packb([1])),
    nested(11, msgpack.packb([[1], None, None])),
    nested(11, msgpack.packb([ARRAY, [True], None])),
    nested(11, msgpack.packb([ARRAY, ARRAY, None])),
    nested(11, msgpack.packb([ARRAY, None])),
    nested(12, msgpack.packb(["bfloat16", ARRAY])),
    nested(12, msgpack.packb([1, ARRAY])),
    b"\x81" + nested(1, msgpack.packb(["<f4", [1], b"abcd"])) + b"\x01",  # an array cannot be a key
    msgpack.packb("x").replace(b"x", b"\xff"),
]


@pytest.mark.parametrize("packed", HOSTILE, ids=lambda packed: packed[:12].hex() or "empty")
def test_invalid_packed_values_raise(packed: bytes) -> None:
    with pytest.raises(CorruptTrace):
        unpack(packed)


def test_deeply_nested_extensions_raise() -> None:
    packed = msgpack.packb(None)
    for _ in range(3000):
        packed = nested(4, b"\x91", packed)
    with pytest.raises(CorruptTrace):
        unpack(packed)


@given(st.binary(max_size=200))
def test_unpacking_any_bytes_gives_a_value_or_corrupt_trace(packed: bytes) -> None:
    with contextlib.suppress(CorruptTrace):
        unpack(packed)


@given(st.integers(1, 12), st.binary(max_size=60), st.booleans())
def test_unpacking_any_extension_payload_gives_a_value_or_corrupt_trace(
    code: int, payload: bytes, listed: bool
) -> None:
    with contextlib.suppress(CorruptTrace):
        unpack(nested(code, msgpack.packb([payload, [2], payload]) if listed else payload))


def test_an_unknown_extension_is_returned_unchanged() -> None:
    assert unpack(nested(77, b"later")) == msgpack.ExtType(77, b"later")


@pytest.mark.parametrize("text", ["<f4", "|b1", "|u1", ">i8", "<U5", "|S3", "<M8[ns]", "<m8", "<c16", "<f16"])
def test_plain_dtypes_are_accepted(text: str) -> None:
    assert is_plain_dtype(text)
    assert np.dtype(text).str in (text, text.replace("<", ">"), text.replace(">", "<"))


@pytest.mark.parametrize("text", ["|O", "O", "f4,f4", "(2,)f4", "<f4\n", "", "|V8", None, 4, "{'a': 1}", "<fx", "<f4 "])
def test_other_dtypes_are_rejected(text: Any) -> None:
    assert not is_plain_dtype(text)


def test_arrays_of_objects_hold_their_items_unchanged() -> None:
    arrays = [np.zeros(2), np.zeros(2)], [np.array(1), np.array(2)]
    for items in ([], [[1, 2], [3, 4]], *arrays, ["ab", "cd"], [1, None]):
        array = objects(list(items))
        assert array.dtype == object
        assert array.shape == (len(items),)
        assert all(held is item for held, item in zip(array, items))


@given(stnp.arrays(stnp.integer_dtypes(), st.integers(0, 20), elements=st.integers(0, 9)))
def test_distinct_numbers_are_those_of_numpy(numbers: np.ndarray) -> None:
    found, expected = distinct(numbers), np.unique(numbers)
    assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
