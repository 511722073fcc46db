"""Files for import that were made to do harm: one clear line, soon, and nothing run that lies beside them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest

import gym_trace
from gym_trace.data.json_values import untagged
from gym_trace.errors import UnreadableRecording
from gym_trace.playback.episode_index import index_of

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


def recorded(directory: Path, **notes: Any) -> gym_trace.Trace:
    """Two episodes of CartPole."""
    with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory) as env:
        for seed in range(2):
            env.reset(seed=seed)
            for _ in range(5):
                env.annotate(**notes)
                env.step(0)
    return gym_trace.open_trace(directory)


def exported(tmp_path: Path, form: str, **options: Any) -> Path:
    out = tmp_path / "out"
    gym_trace.export(recorded(tmp_path / "trace"), out, form, **options)
    return out


def refusal(path: Path, form: str | None = None) -> str:
    """The one line that an import is refused with, after which there is nothing."""
    target = path.parent / "refused"
    with pytest.raises(UnreadableRecording) as caught:
        gym_trace.import_trace(path, target, form)
    assert not target.exists()
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("form", [None, "jsonl", "d4rl"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, form: str | None) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe", form)


def test_a_pipe_within_a_data_set_is_not_waited_for(tmp_path: Path) -> None:
    out = exported(tmp_path, "parquet")
    os.mkfifo(out / "steps" / "z.parquet")
    assert "z.parquet: not a regular file" in refusal(out)


# -- HDF5 -------------------------------------------------------------------------------------------------------------


def transitions(path: Path, **others: Any) -> Path:
    """Ten transitions in a file as D4RL has it."""
    arrays = {"observations": np.zeros((10, 3)), "actions": np.zeros((10, 2)), "rewards": np.zeros(10)}
    with h5py.File(path, "w") as file:
        for name, array in (arrays | {"terminals": np.zeros(10, bool)} | others).items():
            file[name] = array
    return path


def _without_end(path: Path) -> None:
    """H5Rows without an element take no room."""
    names = ("observations", "actions", "rewards", "terminals")
    with h5py.File(path, "w") as file:
        for name in names:
            file.create_dataset(name, (1 << 60, 0), "f4", maxshape=(None, None), chunks=(8, 8))


def _many_paths(path: Path) -> None:
    """Eight levels of twelve groups, all of which have all of the next level in them."""
    with h5py.File(transitions(path), "a") as file:
        levels = [[file.create_group(f"{level}-{i}") for i in range(12)] for level in range(8)]
        for above, below in zip([[file.create_group("infos")], *levels], levels):
            for group in above:
                for i, inner in enumerate(below):
                    group[str(i)] = inner


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (_without_end, "but only 0 bytes stored"),
        (_many_paths, "duplicate name"),
        (lambda path: transitions(path, terminals=np.zeros((10, 5))), "one number per row"),
        (lambda path: transitions(path, **{n: np.zeros((0, 2)) for n in ("observations", "actions")},
                                  rewards=np.zeros(0), terminals=np.zeros(0)), "has no episodes"),
    ],
)  # fmt: skip
def test_hdf5_files_that_lead_astray_are_refused(tmp_path: Path, made: Callable[[Path], Any], told: str) -> None:
    made(tmp_path / "file.hdf5")
    assert told in refusal(tmp_path / "file.hdf5", "d4rl")


def test_a_text_that_all_rows_refer_to_takes_memory_for_some_of_them(tmp_path: Path) -> None:
    path = transitions(tmp_path / "file.hdf5")
    with h5py.File(path, "a") as file:
        texts = file.create_dataset("infos/x", (10,), h5py.string_dtype())
    from gym_trace.exchange.formats.hdf5.reading import H5File
    from gym_trace.exchange.formats.rows import step_ranges

    assert texts.id.valid == 0
    with H5File(path) as reading:
        assert next(step_ranges(10**6, reading.root.group("infos").rows("x").row_size)) <= (0, 128)


def _minari(path: Path, change: Callable[[Any], None], *forgotten: str) -> Path:
    """Changes the first episode."""
    said = json.loads((path / "data" / "metadata.json").read_text())
    (path / "data" / "metadata.json").write_text(json.dumps({k: v for k, v in said.items() if k not in forgotten}))
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        change(file)
    return path


def _in_itself(file: Any) -> None:
    del file["episode_0/observations"]
    group = file["episode_0"].create_group("observations")
    group["a"] = group["b"] = group


def test_unknown_episode_numbers_are_rejected(tmp_path: Path) -> None:
    out = exported(tmp_path, "minari")
    _minari(out, lambda file: file.create_group("episode_" + "9" * 5000))
    gym_trace.import_trace(out, tmp_path / "again")


def test_a_group_in_itself_is_refused_where_spaces_are_not_said(tmp_path: Path) -> None:
    out = exported(tmp_path, "minari")
    told = ("gym_trace", "observation_space", "action_space")
    assert "duplicate name" in refusal(_minari(out, _in_itself, *told), "minari")


def named_again(path: Path, place: str, texts: int, size: int) -> Path:
    """A dataset of Minari in which many texts of an array or attribute are one of this size."""
    out = exported(path, "minari")
    file_path = out / "data" / "main_data.hdf5"
    values = ["x" * size, *(f"{number:05}" for number in range(1, texts))]

    def copied(old: Any, new: Any) -> None:
        for name, found in old.items():
            if isinstance(found, h5py.Group):
                copied(found, new.create_group(name))
            elif found.dtype.kind in "biuf":
                new[name] = found[()]

    with h5py.File(file_path) as old, h5py.File(path / "new.hdf5", "w") as new:  # without checksums of objects
        copied(old, new)
        if place == "attribute":
            new["episode_0"].attrs.create("options/x", values, dtype=h5py.string_dtype())
        else:
            new["episode_0"].create_dataset("infos/x", data=values, dtype=h5py.string_dtype())
    raw = bytearray((path / "new.hdf5").read_bytes())
    at = next(at for at in _places(raw, size.to_bytes(4, "little")) if raw[at + 16 : at + 20] == b"\5\0\0\0")
    raw[at : at + 16 * texts] = raw[at : at + 16] * texts  # a reference to a text has 16 bytes
    file_path.write_bytes(raw)
    return out


def _places(raw: bytearray, wanted: bytes) -> Iterator[int]:
    at = raw.find(wanted)
    while at >= 0:
        yield at
        at = raw.find(wanted, at + 1)


def test_an_attribute_that_names_one_text_many_times_is_refused(tmp_path: Path) -> None:
    out = named_again(tmp_path, "attribute", 3001, 2 << 20)
    assert "episode_0@options/x: 3001 texts are too many" in refusal(out, "minari")


def test_rows_that_name_one_text_many_times_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.exchange.formats.hdf5.reading._MOST_TEXT", 1 << 20)
    told = ("gym_trace", "observation_space", "action_space")
    out = _minari(named_again(tmp_path, "rows", 6, 3 << 20), lambda file: None, *told)
    monkeypatch.setattr("gym_trace.exchange.formats.hdf5.reading._MOST_TEXT_READS", 2)
    assert "infos/x: one text is named too many times" in refusal(out, "minari")


def test_options_of_an_attribute_come_back(tmp_path: Path) -> None:
    options = {"words": ["a", "bé"], "word": "c", "number": 3, "numbers": np.arange(3.0), "is": True}

    def change(file: Any) -> None:
        attributes = file["episode_0"].attrs
        attributes.update({f"options/{name}": value for name, value in options.items()})
        attributes["unread"] = np.zeros(2, [("a", "i4"), ("b", "f4")])
        del attributes["gym_trace"]

    gym_trace.import_trace(_minari(exported(tmp_path, "minari"), change), tmp_path / "again")
    found = next(episode.options for episode in gym_trace.open_trace(tmp_path / "again") if episode.options)
    plain = {name: np.asarray(value).tolist() for name, value in options.items()}
    assert {name: np.asarray(value).tolist() for name, value in found.items()} == plain


def test_options_of_a_type_that_is_unknown_are_refused(tmp_path: Path) -> None:
    out = exported(tmp_path, "minari")
    odd = np.zeros(2, [("a", "i4"), ("b", "f4")])
    _minari(out, lambda file: file["episode_0"].attrs.create("options/x", odd))
    assert "options/x: unsupported dtype" in refusal(out, "minari")


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "gzip", "shuffle": True, "fletcher32": True},
        {"compression": "lzf"},
        {"compression": "gzip", "chunks": (100, 2)},
    ],
    ids=str,
)
def test_the_cache_holds_the_chunks_of_the_next_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Each chunk is then decompressed once, although episodes are short."""
    from gym_trace.exchange.formats.hdf5 import reading

    monkeypatch.setattr(reading, "_CACHE", 64)
    values = np.random.default_rng(0).normal(size=(1000, 3))
    path = transitions(tmp_path / "file.hdf5")
    with h5py.File(path, "w") as file:
        for name, width in {"observations": 3, "actions": 3, "rewards": 1, "terminals": 1}.items():
            chosen = options | ({"chunks": (100, *options["chunks"][1:])[:2]} if "chunks" in options else {})
            rows = values[:, :width] if width > 1 else np.arange(1000) % 7 == 6
            chosen = chosen if width > 1 else {**chosen, "chunks": (100,)}
            file.create_dataset(name, data=rows, **chosen)
    gym_trace.import_trace(path, tmp_path / "again")
    trace = gym_trace.open_trace(tmp_path / "again")
    assert len(trace) == 143
    assert np.array_equal(np.concatenate([episode.actions for episode in trace]), values)
    assert np.array_equal(np.concatenate([episode.observations[:-1] for episode in trace]), values)
    with reading.H5File(path) as file:
        for name in ("observations", "actions", "rewards"):
            rows = file.root.rows(name)
            _, size, _ = rows._dataset.id.get_access_plist().get_chunk_cache()
            assert size >= rows._dataset.chunks[0] * rows.row_size


def test_chunks_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = transitions(tmp_path / "file.hdf5")
    with h5py.File(path, "a") as file:
        del file["observations"]
        file.create_dataset("observations", data=np.zeros((10, 3)), maxshape=(None, 3), chunks=(1 << 18, 3),
                            compression="gzip")  # fmt: skip
    gym_trace.import_trace(path, tmp_path / "again")
    monkeypatch.setattr("gym_trace.exchange.formats.hdf5.reading._MOST_BAND", 1 << 22)
    assert "are too large to be decompressed" in refusal(path, "d4rl")


def test_chunks_that_are_too_large_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gym_trace.exchange.formats.hdf5 import reading

    path = transitions(tmp_path / "file.hdf5")
    with h5py.File(path, "a") as file:
        file.create_dataset("large", data=np.zeros((10, 3)), maxshape=(None, 3), chunks=(1 << 18, 3), compression="lzf")
    monkeypatch.setattr(reading, "_MOST_BAND", 8 << 20)
    with reading.H5File(path) as opened:
        kept = [opened.root.rows("large") for _ in range(2)]
        with pytest.raises(UnreadableRecording, match="too large to be read together"):
            opened.root.rows("large")
        del kept[0]
        assert opened.root.rows("large").read().shape == (10, 3)


def test_filters_that_are_not_usual_are_refused(tmp_path: Path) -> None:
    path = transitions(tmp_path / "file.hdf5", observations=np.zeros((10, 3), np.int32))
    with h5py.File(path, "a") as file:
        del file["actions"]
        file.create_dataset("actions", data=np.zeros((10, 3), np.int32), chunks=(10, 3), scaleoffset=0)
    assert "actions: filter 6 is not supported; use gzip, shuffle, fletcher32, lzf" in refusal(path, "d4rl")


def test_very_many_arrays_of_infos_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.exchange.formats.hdf5.reading.MOST_ARRAYS", 5)
    path = transitions(tmp_path / "file.hdf5", **{f"infos/a/{number}": np.zeros(10) for number in range(6)})
    assert "infos: has more than 5 arrays" in refusal(path, "d4rl")


def test_groups_of_many_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name would be an episode of what lies in the file once."""
    monkeypatch.setattr("gym_trace.exchange.formats.hdf5.reading._BYTES_PER_BYTE", 1)
    out = exported(tmp_path, "minari")

    def change(file: Any) -> None:
        del file["episode_0/observations"]
        file["episode_0/observations"] = np.zeros((6, 4, 10_000))
        for number in range(2, 40):
            file[f"episode_{number}"] = file["episode_0"]

    _minari(out, change, "gym_trace", "observation_space", "total_episodes", "total_steps")
    assert "more bytes than a file of this size can hold" in refusal(out, "minari")


# -- what gym-trace itself has said ------------------------------------------------------------------------------------


def forged(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """JSON lines with something else in what is known of the trace."""
    out = exported(tmp_path, "jsonl")
    first, *lines = out.read_text().splitlines()
    said = json.loads(first)
    known = json.loads(said["gym_trace"])
    change(known)
    out.write_text("\n".join([json.dumps(said | {"gym_trace": json.dumps(known)}), *lines]))
    return out


def test_imports_ignore_file_names_in_metadata(tmp_path: Path) -> None:
    lies = {"origins": [[1, 2]], "host": "theirs", "batch": 3, "format": [9, 9]}
    out = forged(tmp_path, lambda known: [schema.update(lies) for schema in known["writers"].values()])
    gym_trace.import_trace(out, tmp_path / "again")
    (reader,) = index_of(gym_trace.open_trace(tmp_path / "again")).readers
    assert reader.schema["host"] == "unknown"
    assert "origins" not in reader.schema


def test_json_of_very_many_lists_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"type": "trace", "gym_trace": [' + b"[]," * (9 << 20) + b"[]]}\n")
    assert "more than 8388608 lists, maps and entries" in refusal(path)


def test_keys_that_were_made_to_have_one_hash_are_refused() -> None:
    with pytest.raises(UnreadableRecording, match="colliding keys"):
        untagged({"$map": [[(2**61 - 1) * number, 0] for number in range(2000)]})


# -- links and holes --------------------------------------------------------------------------------------------------


def test_a_link_out_of_a_data_set_is_not_followed(tmp_path: Path) -> None:
    out = exported(tmp_path, "parquet")
    (file,) = (out / "steps").glob("*.parquet")
    (tmp_path / "elsewhere").mkdir()
    file.rename(tmp_path / "elsewhere" / file.name)
    file.symlink_to(tmp_path / "elsewhere" / file.name)
    assert "is a link out of" in refusal(out)
    file.unlink()
    (out / "steps").rmdir()
    (out / "steps").symlink_to(tmp_path / "elsewhere")
    assert "is a link out of" in refusal(out)


def test_links_within_a_data_set_and_the_name_of_it_are_followed(tmp_path: Path) -> None:
    out = exported(tmp_path, "parquet")
    (file,) = (out / "steps").glob("*.parquet")
    (out / "files").mkdir()
    file.rename(out / "files" / file.name)
    file.symlink_to(Path("..", "files", file.name))
    (tmp_path / "latest").symlink_to(out)
    assert gym_trace.import_trace(tmp_path / "latest", tmp_path / "again").episodes == 2


def in_cache(tmp_path: Path) -> Path:
    """A dataset as Hugging Face keeps one: a snapshot with links to blobs."""
    root = tmp_path / "hub" / "datasets--me--data"
    snapshot = root / "snapshots" / "0123abc"
    (root / "snapshots").mkdir(parents=True)
    (root / "blobs").mkdir()
    exported(tmp_path, "parquet").rename(snapshot)
    for number, file in enumerate(sorted(snapshot.glob("*/*.parquet"))):
        file.rename(root / "blobs" / f"{number:040}")
        file.symlink_to(Path("..", "..", "..", "blobs", f"{number:040}"))
    return snapshot


def test_a_snapshot_in_a_cache_of_hugging_face_is_imported(tmp_path: Path) -> None:
    assert gym_trace.import_trace(in_cache(tmp_path), tmp_path / "again").episodes == 2


def test_a_blob_of_a_cache_that_leads_out_of_it_is_not_followed(tmp_path: Path) -> None:
    snapshot = in_cache(tmp_path)
    blob = snapshot.parents[1] / "blobs" / f"{0:040}"
    blob.rename(tmp_path / "elsewhere")
    blob.symlink_to(tmp_path / "elsewhere")
    assert "is a link out of" in refusal(snapshot)


def test_a_file_that_is_mostly_holes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"type": "trace"}\n')
    os.truncate(path, 1 << 30)
    assert "are on disk" in refusal(path)


# -- small files of much ----------------------------------------------------------------------------------------------


def test_a_small_parquet_file_of_one_enormous_value_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    gym_trace.export(recorded(tmp_path / "trace", note={"a": 1}), out, "parquet")
    (file,) = (out / "steps").glob("*.parquet")
    table = pq.read_table(file)
    place, kind = table.schema.get_field_index("annotations"), table.schema.field("annotations").type
    values = ["[" + "[]," * (3 << 20) + "0]", *[None] * (len(table) - 1)]
    notes = pa.StructArray.from_arrays([pa.array(values, pa.string())], fields=[*kind])
    forged = table.set_column(place, table.schema.field(place), notes)
    pq.write_table(forged.replace_schema_metadata(table.schema.metadata), file, compression="zstd")
    assert file.stat().st_size < 64 << 10
    assert "too many lists, maps and numbers" in refusal(out)
    monkeypatch.setattr("gym_trace.exchange.formats.foreign._FREE_BYTES", 1 << 20)
    monkeypatch.setattr("gym_trace.exchange.formats.foreign._BYTES_PER_BYTE", 64)
    assert "too much memory for a file" in refusal(out)


def test_a_parquet_file_of_more_rows_than_it_can_have_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"item": pa.nulls(1 << 20, pa.binary())}), tmp_path / "a.parquet")
    monkeypatch.setattr("gym_trace.exchange.formats.foreign._ROWS_PER_BYTE", 16)
    assert "too much memory for a file" in refusal(tmp_path / "a.parquet", "table")


_FLIP_THE_FOOTER = """
import sys
from contextlib import suppress
from pathlib import Path
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.parquet.tables import located, parquet_file
path = Path(sys.argv[1])
raw = path.read_bytes()
size = int.from_bytes(raw[-8:-4], "little")
for at in range(len(raw) - 8 - size, len(raw) - 8):
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    with suppress(UnreadableRecording), located(path):
        parquet_file(path)
"""


def test_malformed_metadata_of_a_parquet_file_is_an_error(tmp_path: Path) -> None:
    """In a process of its own: Arrow ends it when it is asked for a column with malformed metadata."""
    lists = pa.array([[1.0, None]] * 9, pa.list_(pa.float32()))
    pq.write_table(pa.table({"observation": lists, "action": [1] * 9, "done": [False] * 9}), tmp_path / "a.parquet")
    command = [sys.executable, "-c", _FLIP_THE_FOOTER, str(tmp_path / "a.parquet")]
    done = forked_python.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_small_table_of_very_many_episodes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = np.ones(1 << 15)
    table = pa.table({"observation": ones, "action": ones, "reward": ones, "done": ones.astype(bool)})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert gym_trace.import_trace(tmp_path / "a.parquet", tmp_path / "again").episodes == 1 << 15
    monkeypatch.setattr("gym_trace.exchange.formats.foreign._FREE_ROWS", 1 << 10)
    assert "episodes, too many for its size" in refusal(tmp_path / "a.parquet")


def test_values_of_a_batch_share_what_memory_they_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    from gym_trace.exchange.formats.foreign import all_from_json
    from gym_trace.exchange.formats.lerobot.features import values_of

    monkeypatch.setattr("gym_trace.exchange.formats.foreign._MOST_MEMORY", 1 << 20)
    text = "[" + "0," * (1 << 12) + "0]"
    for read in (lambda texts: values_of(texts, "values", "x"), lambda texts: all_from_json(map(str.encode, texts))):
        assert len(read([text] * 2)) == 2
        with pytest.raises(UnreadableRecording, match="too many lists, maps and numbers"):
            read([text] * 20)


# -- others -----------------------------------------------------------------------------------------------------------


def test_errors_of_other_packages_become_one_line_with_the_path(tmp_path: Path) -> None:
    out = exported(tmp_path, "minari", kind="arrow")
    (out / "data" / "metadata.json").write_text(
        json.dumps(
            {k: v for k, v in json.loads((out / "data" / "metadata.json").read_text()).items() if k != "gym_trace"}
        )
    )
    (out / "data" / "0" / "metadata.json").unlink()
    path = out / "data" / "0" / "part-0.arrow"
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    rows = pa.array(range(len(table)))
    twice = pa.StructArray.from_arrays([rows, pa.StructArray.from_arrays([rows], ["b"])], ["a", "a"])
    kept = [name for name in table.schema.names if name not in ("infos", "gym_trace")]
    with pa.ipc.new_file(path, (table := table.select(kept).append_column("infos", twice)).schema) as writer:
        writer.write_table(table)
    assert "infos/a: missing, or named twice" in refusal(out)


def test_a_picture_that_says_to_be_enormous_is_refused() -> None:
    import io

    from gym_trace.exchange.formats.minari.spaces import jpeg_pictures

    file = io.BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG")
    raw = bytearray(file.getvalue())
    at = raw.index(b"\xff\xc0") + 5
    raw[at : at + 4] = b"\xfd\xe8\xfd\xe8"
    with pytest.raises(UnreadableRecording, match="decompression bomb"):
        jpeg_pictures([bytes(raw)], (64, 64, 3), UnreadableRecording)


def test_texts_of_lerobot_that_repeat_take_memory_once(tmp_path: Path) -> None:
    from gym_trace.exchange.formats.parquet.tables import batches

    indices = pa.array(np.zeros(1000, np.int32))
    table = pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array(["x" * (1 << 20)]))})
    pq.write_table(table, tmp_path / "file.parquet")
    before = pa.total_allocated_bytes()
    first = next(batches(tmp_path / "file.parquet", 1000, ["text"]))
    assert len(first) == 8
    assert pa.total_allocated_bytes() - before < 64 << 20


def test_modules_in_the_working_directory_are_not_run(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    out = exported(tmp_path, "parquet")
    (tmp_path / "pyarrow.py").write_text("raise SystemExit(3)")
    said = f"import sys; sys.path[:] = {[path for path in sys.path if path]!r}; import gym_trace as g; "
    code = said + f"g.import_trace({str(out)!r}, {str(tmp_path / 'again')!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_names_of_annotations_with_slashes_come_back(tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    pytest.importorskip("google.protobuf")
    trace = recorded(tmp_path / "trace", **{"a/b%2F": 1.5})
    gym_trace.export(trace, tmp_path / "rlds", "rlds")
    gym_trace.import_trace(tmp_path / "rlds", tmp_path / "again")
    assert list(gym_trace.open_trace(tmp_path / "again")[0].annotations) == ["a/b%2F"]


def test_rows_of_another_byte_order_come_back(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "trace", big=np.arange(3, dtype=">i4"))
    gym_trace.export(trace, tmp_path / "lines", "jsonl")
    gym_trace.import_trace(tmp_path / "lines", tmp_path / "again")
    (first, *_), (again, *_) = (
        episode[0].annotations["big"] for episode in (trace, gym_trace.open_trace(tmp_path / "again"))
    )
    assert np.asarray(first).dtype == np.asarray(again).dtype


def test_arrays_that_d4rl_does_not_have_become_annotations_or_are_named(tmp_path: Path) -> None:
    path = transitions(tmp_path / "file.hdf5", returns=np.arange(10.0), words=[b"a"] * 10, weights=np.zeros((3, 3)))
    with h5py.File(path, "a") as file:
        file["infos/short"], file["metadata/policy/bias"] = np.zeros(4), np.zeros(5)
        file["metadata/algorithm"] = "SAC"
        file["elsewhere"] = h5py.SoftLink("/observations")
    report = gym_trace.import_trace(path, tmp_path / "trace")
    [episode] = gym_trace.open_trace(tmp_path / "trace")
    assert episode.annotations["returns"].tolist() == [*range(10)]
    assert list(episode.annotations["words"]) == ["a"] * 10
    told = "; ".join(report.warnings)
    assert "become annotations: returns, words" in told
    assert "infos/short, elsewhere, weights, metadata/policy/bias" in told
    assert "algorithm" not in told
