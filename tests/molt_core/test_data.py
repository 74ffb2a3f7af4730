"""Prompt sources: order, position, held-out rows, formats, and errors that name the place."""

import io
import json
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from molt_core.config import TaskConfig
from molt_core.data import DataError, PromptSource, check_prompts, prompt_source
from molt_core.types import Item

PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "PNG")
    return buffer.getvalue()


def _rows(count):
    return [{"id": f"q{n}", "prompt": f"what is {n}?", "answer": str(n)} for n in range(count)]


def _write_jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _source(path, split="train", seed=0, eval_items=2):
    return prompt_source(TaskConfig(source=str(path), eval_items=eval_items), split, seed)


def _ids(source, start, stop):
    return [source.item(index).prompt_id for index in range(start, stop)]


def _numbered(length, seed):
    return PromptSource(lambda n: Item(str(n), ()), length, seed)


def test_each_pass_is_a_new_permutation_of_all_rows():
    source = _numbered(10, seed=3)
    first, second = _ids(source, 0, 10), _ids(source, 10, 20)
    assert sorted(first, key=int) == sorted(second, key=int) == [str(n) for n in range(10)]
    assert first != second


def test_order_depends_on_the_seed_and_on_nothing_else():
    assert _ids(_numbered(50, 1), 0, 120) == _ids(_numbered(50, 1), 0, 120)
    assert _ids(_numbered(50, 1), 0, 50) != _ids(_numbered(50, 2), 0, 50)


def test_a_position_is_an_integer():
    """What follows index 57 is the same whether the source was read up to it or opened there."""
    continued, resumed = _numbered(20, 5), _numbered(20, 5)
    _ids(continued, 0, 57)
    assert _ids(continued, 57, 90) == _ids(resumed, 57, 90)


def test_held_out_rows_are_apart_and_the_same_for_every_seed(tmp_path):
    file = _write_jsonl(tmp_path / "rows.jsonl", _rows(12))
    held = _ids(_source(file, "eval", seed=0, eval_items=4), 0, 4)
    assert held == _ids(_source(file, "eval", seed=9, eval_items=4), 0, 4)
    trained = _ids(_source(file, "train", eval_items=4), 0, 8)
    assert Counter(held + trained) == Counter(f"q{n}" for n in range(12))


def test_held_out_rows_do_not_depend_on_the_order_of_the_file(tmp_path):
    one = _write_jsonl(tmp_path / "one.jsonl", _rows(12))
    two = _write_jsonl(tmp_path / "two.jsonl", _rows(12)[::-1])
    assert set(_ids(_source(one, "eval"), 0, 2)) == set(_ids(_source(two, "eval"), 0, 2))


def test_text_prompt_with_pictures_becomes_one_user_message(tmp_path):
    (tmp_path / "picture.png").write_bytes(_png())
    row = {"prompt": "what is it?", "answer": "a ramp", "images": ["picture.png"], "level": 3}
    file = _write_jsonl(tmp_path / "rows.jsonl", [row, *_rows(2)])
    items = [
        _source(file, split, eval_items=1).item(n) for split in ("train", "eval") for n in (0, 1)
    ]
    item = next(item for item in items if item.answer == "a ramp")
    assert item.messages == (
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]},
    )
    np.testing.assert_array_equal(item.images[0], PIXELS)
    assert item.info == {"level": 3}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_hugging_face_folder_with_splits(tmp_path, kind):
    """Laid out as datasets does: parquet shards named by split, or Arrow streams in a folder a split; image structs."""
    parts = [{"type": "image"}, {"type": "text", "text": "which?"}]
    chat = [{"role": "user", "content": parts}]  # in a table the first part gets a "text": None
    picture = {"bytes": _png(), "path": None}
    for split, count in (("train", 5), ("test", 3)):
        table = pyarrow.Table.from_pylist(
            [
                {"id": f"{split}{n}", "prompt": chat, "answer": "yes", "images": [picture]}
                for n in range(count)
            ]
        )
        if kind == "parquet":
            (tmp_path / "data").mkdir(exist_ok=True)
            file = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(table, file)
        else:
            (tmp_path / split).mkdir()
            file = tmp_path / split / "data-00000-of-00001.arrow"
            with pyarrow.ipc.new_stream(str(file), table.schema) as stream:
                stream.write_table(table)
    train, held_out = _source(tmp_path, "train"), _source(tmp_path, "eval", eval_items=2)
    assert sorted(_ids(train, 0, len(train))) == [f"train{n}" for n in range(5)]
    assert _ids(held_out, 0, len(held_out)) == ["test0", "test1"]
    assert train.item(0).messages == tuple(chat)
    np.testing.assert_array_equal(train.item(0).images[0], PIXELS)


def test_what_datasets_keeps_beside_its_data_is_no_data(tmp_path):
    """``save_to_disk`` lists the data's files in state.json; a ``.map`` afterwards leaves a cache-*.arrow beside them."""
    table = pyarrow.Table.from_pylist(_rows(4))
    for name in ("data-00000-of-00001.arrow", "cache-1f0e5d.arrow", "mine.arrow"):
        with pyarrow.ipc.new_stream(str(tmp_path / name), table.schema) as stream:
            stream.write_table(table)
    listed = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    state = tmp_path / "state.json"
    state.write_text(json.dumps(listed))
    assert len(_source(tmp_path, eval_items=1)) == 3
    state.unlink()
    (tmp_path / "mine.arrow").unlink()  # as in its cache, where no state.json is
    assert len(_source(tmp_path, eval_items=1)) == 3
    state.write_text("[]")
    with pytest.raises(DataError, match="state.json: not what datasets writes"):
        _source(tmp_path, eval_items=1)


def _chat(content):
    return json.dumps({"prompt": [{"role": "user", "content": content}], "answer": "y"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', r"rows.jsonl, line 2: not JSON"),
        ('{"prompt": "x"}', r"rows.jsonl, line 2: key 'answer' is missing"),
        ('{"prompt": 3, "answer": "y"}', r"rows.jsonl, line 2: prompt is neither text nor"),
        (
            '{"prompt": "x", "answer": "y", "id": "q0"}',
            r"line 2: id: 'q0' is also the id of .*line 1",
        ),
        ('{"prompt": "x", "answer": "y", "images": "a.png"}', r"line 2: images is not a list"),
        ("[1]", r"rows.jsonl, line 2: a row is an object"),
        (_chat(5), r"line 2: prompt is neither text nor"),
        (_chat([1, 2]), r"line 2: prompt is neither text nor"),
        (
            _chat([{"type": "image"}, {"type": "text", "text": "x"}]),
            r"line 2: prompt has places for 1 images and images has 0",
        ),
        (
            json.dumps(
                {"prompt": [{"role": "user", "content": "x"}], "answer": "y", "images": ["a.png"]}
            ),
            r"line 2: prompt has places for 0 images and images has 1",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(_rows(1)[0]) + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        _source(file, eval_items=1)


def test_a_bad_parquet_row_is_named(tmp_path):
    rows = [{"prompt": "x", "answer": "y"}, {"prompt": None, "answer": "y"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet, row 1: key 'prompt' is missing or null"):
        _source(tmp_path / "rows.parquet", eval_items=1)


def test_a_missing_picture_is_named(tmp_path):
    rows = [{**row, "images": ["gone.png"]} for row in _rows(3)]
    source = _source(_write_jsonl(tmp_path / "rows.jsonl", rows), eval_items=1)
    with pytest.raises(DataError, match=r"rows.jsonl, line \d: images\[0\] \(gone.png\): "):
        source.item(0)


def test_a_line_in_another_encoding_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "caf\xe9", "answer": "y"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: not JSON in UTF-8"):
        _source(file)


def _encoded(kind, size=(64, 64)):
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(noise).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("picture", "what"),
    [
        (_encoded("PNG")[:-4000], "cannot be decoded"),
        (_encoded("JPEG")[:-2000], "cannot be decoded"),
        (_encoded("PNG")[:40], "cannot be decoded"),
        (b"no picture", "cannot be decoded"),
        (b"", "cannot be decoded"),
        (_encoded("PNG", (4, 1000)), "4 by 1000 pixels"),
    ],
    ids=["half a PNG", "half a JPEG", "a head", "text", "empty", "thin"],
)
def test_a_bad_picture_is_named_before_a_run_and_where_it_is_asked_for(tmp_path, picture, what):
    (tmp_path / "good.jpg").write_bytes(_encoded("JPEG"))
    (tmp_path / "bad").write_bytes(picture)
    rows = [{**row, "images": ["good.jpg"]} for row in _rows(4)]
    file = _write_jsonl(tmp_path / "rows.jsonl", rows)
    task = TaskConfig(source=str(file), eval_items=2)
    check_prompts(task)
    rows[1]["images"].append("bad")
    _write_jsonl(file, rows)
    named = rf"rows.jsonl, line 2: images\[1\] \(bad\): {what}"
    with pytest.raises(DataError, match=named):
        check_prompts(task)
    sources = [_source(file, split) for split in ("train", "eval")]
    with pytest.raises(DataError, match=named):
        [source.item(index) for source in sources for index in range(2)]


def test_an_id_costs_no_picture(tmp_path):
    """The books ask for ids in the loop's own thread: a row whose picture is gone still has its id."""
    rows = [{**row, "images": ["gone.png"]} for row in _rows(3)]
    source = _source(_write_jsonl(tmp_path / "rows.jsonl", rows), eval_items=1)
    assert len({source.prompt_id(index) for index in range(2)}) == 2
    with pytest.raises(DataError, match="gone"):
        source.item(0)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_id_is_that_of_its_item(tmp_path, split):
    file = _write_jsonl(tmp_path / "rows.jsonl", _rows(6))
    shapes = prompt_source(TaskConfig(source="shapes", train_items=5, eval_items=5), split, 3)
    for source in (_source(file, split, seed=3), shapes):
        for index in range(7):
            assert source.prompt_id(index) == source.item(index).prompt_id


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "holds no"),
        (("test.jsonl",), "no training file"),
    ],
)
def test_folders_without_training_rows_are_refused(tmp_path, files, message):
    for file in files:
        _write_jsonl(tmp_path / file, _rows(3))
    with pytest.raises(DataError, match=message):
        _source(tmp_path)


def test_holding_out_everything_is_refused(tmp_path):
    with pytest.raises(DataError, match="task.eval_items: 3 rows .* has 3"):
        _source(_write_jsonl(tmp_path / "rows.jsonl", _rows(3)), eval_items=3)


def test_variant_of_a_file_source_is_refused(tmp_path):
    file = _write_jsonl(tmp_path / "rows.jsonl", _rows(3))
    with pytest.raises(DataError, match="task.variant"):
        prompt_source(TaskConfig(source=str(file), variant={"colors": 4}), "train", 0)
