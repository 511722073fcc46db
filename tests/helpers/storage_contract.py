"""Contract tests for every storage (gym_trace.storage.protocol).

class TestMine(StorageContract):
    @pytest.fixture
    def storage(self):
        return MyStorage(...)  # its directory does not exist yet
"""

import copy
import pickle
from collections.abc import Callable, Iterable

import pytest

from gym_trace.errors import TraceNotFound
from gym_trace.storage.protocol import ReadStorage, Span, Storage


def _written(storage: Storage, name: str, pieces: Iterable[bytes | memoryview]) -> None:
    storage.make()
    file = storage.create(name)
    for piece in pieces:
        file.write(piece)
    file.close()


def _content(storage: ReadStorage, name: str) -> bytes:
    with storage.open(name) as file:
        return file.read(0, file.size + 1)


class StorageContract:
    """Tests of the fixture `storage`, which a subclass defines."""

    def test_make_creates_the_place_once(self, storage: Storage) -> None:
        with pytest.raises(TraceNotFound):
            storage.names()
        storage.make()
        storage.make()
        assert storage.names() == []

    def test_names_lists_only_files(self, storage: Storage) -> None:
        for name in ("w.manifest.jsonl", "w.000000.gtb.part"):
            _written(storage, name, [b"some"])
            assert storage.root in storage.path(name)
            assert name in storage.path(name)
        storage.sync()
        assert sorted(storage.names()) == ["w.000000.gtb.part", "w.manifest.jsonl"]
        storage.remove("w.manifest.jsonl")
        assert storage.names() == ["w.000000.gtb.part"]

    def test_ranges_round_trip(self, storage: Storage) -> None:
        data = bytes(range(256)) * 1000
        _written(storage, "a", [data[:1], b"", data[1:70_000], memoryview(data)[70_000:]])
        assert storage.size("a") == len(data)
        assert storage.allocated() >= len(data)
        with storage.open("a") as file:
            assert file.size == len(data)
            for offset, length in ((0, 1), (255_000, 1000), (3, 200_000), (255_990, 100), (7, 0)):
                assert file.read(offset, length) == data[offset : offset + length]
                out = memoryview(bytearray(length))
                assert out[: file.read_into(offset, out)] == data[offset : offset + length]

    def test_reading_beyond_the_end_returns_nothing(self, storage: Storage) -> None:
        _written(storage, "a", [b"some"])
        with storage.open("a") as file:
            for offset in (-64, -1, 4, 1 << 50, 1 << 70):
                assert file.read(offset, 64) == b""
                assert file.read_into(offset, memoryview(bytearray(64))) == 0

    def test_a_missing_file_raises_file_not_found(self, storage: Storage) -> None:
        storage.make()
        for call, words in ((storage.open, ()), (storage.size, ()), (storage.remove, ()), (storage.rename, ("b",))):
            with pytest.raises(FileNotFoundError):
                call("a", *words)
        with pytest.raises(FileNotFoundError):
            storage.append("a", b"more")
        assert storage.holder("a") is None
        assert storage.names() == []

    def test_creating_an_existing_name_raises(self, storage: Storage) -> None:
        _written(storage, "a", [b"some"])
        with pytest.raises(FileExistsError):
            storage.create("a")
        assert _content(storage, "a") == b"some"

    def test_a_torn_write_can_be_truncated(self, storage: Storage) -> None:
        storage.make()
        file = storage.create("a")
        file.write(b"whole, torn")
        file.truncate(5)
        file.write(b", again")
        file.sync()
        file.close()
        file.close()
        assert _content(storage, "a") == b"whole, again"

    def test_a_range_of_another_file_can_be_copied(self, storage: Storage) -> None:
        data = bytes(range(256)) * 9000
        _written(storage, "a", [data])
        file = storage.create("b")
        file.write(b"head")
        with storage.open("a") as source:
            file.copy(source, 5, len(data) - 6)
            file.copy(source, 0, 0)
            file.write(b"between")
            file.copy(source, 1, 2)
            storage.append("b", b"last")
            with pytest.raises(OSError, match="shrank"):
                file.copy(source, len(data) - 1, 2)
        file.close()
        assert _content(storage, "b").startswith(b"head" + data[5:-1] + b"between" + data[1:3] + b"last")

    def test_written_data_is_readable_immediately(self, storage: Storage) -> None:
        storage.make()
        file = storage.create("a.part")
        file.write(b"one")
        with storage.open("a.part") as reader:
            file.write(b", two")
            assert reader.size == 3
            assert reader.read(0, 3) == b"one"
            assert _content(storage, "a.part") == b"one, two"
            file.close()
            storage.rename("a.part", "a")
            assert reader.read(1, 2) == b"ne"
        assert storage.names() == ["a"]
        assert _content(storage, "a") == b"one, two"

    def test_other_writers_append_at_the_end(self, storage: Storage) -> None:
        storage.make()
        file = storage.create("a")
        file.write(b"1\n")
        storage.append("a", b"2\n")
        file.write(b"3\n")
        file.close()
        storage.append("a", b"4\n")
        assert _content(storage, "a") == b"1\n2\n3\n4\n"

    def test_a_lock_is_held_until_its_file_is_closed(self, storage: Storage) -> None:
        storage.make()
        locked, free = storage.create("locked", lock=True), storage.create("free")
        assert storage.holder("locked") in ("this process", None)  # locks are optional
        assert storage.holder("free") is None
        locked.write(b"some")
        locked.close()
        free.close()
        assert storage.holder("locked") is None

    def test_an_existing_file_is_reopened_for_appending_with_its_lock(self, storage: Storage) -> None:
        storage.make()
        with pytest.raises(FileNotFoundError):
            storage.reopen("a", locked=True)
        locked = storage.create("a", lock=True)
        locked.write(b"one, torn")
        if storage.holder("a") is not None:  # not every place has locks
            assert storage.reopen("a", locked=True) is None
        locked.close()
        again = storage.reopen("a", locked=True)
        assert again is not None
        assert storage.holder("a") in ("this process", None)
        again.truncate(3)
        again.write(b", two")
        again.close()
        assert storage.holder("a") is None
        assert _content(storage, "a") == b"one, two"

    def test_a_mapped_file_exists_immediately_and_holds_its_memory(self, storage: Storage) -> None:
        storage.make()
        mapping = storage.map("w.ring", b"begin", 10_000)
        if mapping is None:  # mapping is optional
            return
        assert storage.names() == ["w.ring"]
        assert storage.size("w.ring") == len(mapping.memory) == 10_000
        assert _content(storage, "w.ring") == b"begin".ljust(10_000, b"\0")
        mapping.memory[5_000:5_003] = b"put"
        slab = mapping.memory[5_000:6_000]
        assert _content(storage, "w.ring")[5_000:5_003] == b"put"
        with storage.open("w.ring") as reader:
            mapping.memory[9_999] = 7
            assert reader.size == 10_000
        mapping.close()
        mapping.close()
        slab[0] = 7  # the memory lives as long as a reference to it
        assert _content(storage, "w.ring")[9_999] == 7
        storage.remove("w.ring")
        assert storage.names() == []

    def test_mapping_a_name_again_creates_a_new_file(self, storage: Storage) -> None:
        storage.make()
        one = storage.map("w.ring", b"one", 5_000)
        if one is None:
            return
        with storage.open("w.ring") as reader:
            other = storage.map("w.ring", b"other", 9_000)
            assert other is not None
            one.memory[0] = 0
            assert reader.size == 5_000
        assert storage.names() == ["w.ring"]
        assert _content(storage, "w.ring") == b"other".ljust(9_000, b"\0")
        one.close()
        other.memory[8_999] = 1
        other.close()
        assert _content(storage, "w.ring")[8_999] == 1

    def test_copies_refer_to_the_same_place(self, storage: Storage) -> None:
        _written(storage, "a", [b"some"])
        for other in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
            assert other == storage
            assert hash(other) == hash(storage)
            assert _content(other, "a") == b"some"


class ReadContract:
    """Tests of the fixture `filled`, which returns a ReadStorage with the files that it is given."""

    def test_names_sizes_and_ranges_of_files(self, filled: Callable[[dict[str, bytes]], ReadStorage]) -> None:
        data = bytes(range(256)) * 1000
        storage = filled({"w.manifest.jsonl": b"some", "w.000000.gtb": data})
        assert sorted(storage.names()) == ["w.000000.gtb", "w.manifest.jsonl"]
        assert storage.size("w.000000.gtb") == len(data)
        assert storage.allocated() >= len(data) + 4
        assert storage.root in storage.path("w.000000.gtb")
        storage.expect([Span("w.000000.gtb", 100_000, 50_000), Span("w.manifest.jsonl", -5, 100)])
        with storage.open("w.000000.gtb") as file:
            assert file.size == len(data)
            for offset, length in (
                (0, 1),
                (255_000, 1000),
                (3, 200_000),
                (255_990, 100),
                (7, 0),
                (-1, 9),
                (1 << 60, 9),
            ):
                expected = data[offset : offset + length] if offset >= 0 else b""
                assert file.read(offset, length) == expected
                out = memoryview(bytearray(length))
                assert out[: file.read_into(offset, out)] == expected

    def test_a_missing_file_raises_file_not_found(self, filled: Callable[[dict[str, bytes]], ReadStorage]) -> None:
        storage = filled({"a.gtb": b"some"})
        for call in (storage.open, storage.size, storage.version):
            with pytest.raises(FileNotFoundError):
                call("b")
        assert storage.holder("b") is None

    def test_a_replaced_file_has_another_version(self, filled: Callable[[dict[str, bytes]], ReadStorage]) -> None:
        storage = filled({"a.gtb": b"some"})
        before = storage.version("a.gtb")
        assert storage.version("a.gtb") == before
        storage = filled({"a.gtb": b"someone else's"})
        storage.names()
        assert storage.version("a.gtb") != before

    def test_copies_of_a_storage_read_the_same(self, filled: Callable[[dict[str, bytes]], ReadStorage]) -> None:
        storage = filled({"a.gtb": b"some"})
        for other in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
            assert other == storage
            assert hash(other) == hash(storage)
            assert _content(other, "a.gtb") == b"some"
