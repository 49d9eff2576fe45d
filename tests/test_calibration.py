"""Tests of calibration: every source, exact masks, the same tokens in any process, and what each bad input is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tasks.calibration import CalibrationError, CalibrationSet, prepare, source_problems
from tasks.job import CalibrationConfig

WORDS = ["<unk>", "<s>", ";", *(f"w{i}" for i in range(60))]
BEGIN, SEPARATOR = 1, 2


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A model directory as far as calibration reads it: word tokenizer, begin token, no pad token."""
    directory = tmp_path_factory.mktemp("source")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(WORDS)}))
    return directory


def words(start: int, stop: int) -> str:
    return " ".join(f"w{i % 60}" for i in range(start, stop))


def ids(start: int, stop: int) -> list[int]:
    return [3 + i % 60 for i in range(start, stop)]


def calibrate(source: Path, data: object, *, seed: int = 0, **settings: object) -> CalibrationSet:
    config = CalibrationConfig.model_validate(
        {"data": data, "sequence_length": 8, "min_length": 2, "samples": 16, **settings}
    )
    return prepare(config, source, seed=seed)


def samples(calibration: CalibrationSet) -> list[list[int]]:
    """Every sample without its padding, which must be on the right."""
    rows = []
    for batch in calibration.batches:
        assert batch.input_ids.dtype == torch.int64
        assert batch.attention_mask.dtype == torch.bool
        for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
            length = int(mask.sum())
            assert mask[:length].all(), "padding is not on the right"
            rows.append(row[:length].tolist())
    return rows


def test_running_text_is_cut_into_windows(source, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(words(0, 20))
    calibration = calibrate(source, str(path))
    assert samples(calibration) == [[BEGIN, *ids(0, 7)], ids(7, 15), ids(15, 20)]
    assert calibration.summary == {
        "items": 1,
        "blank": 0,
        "too_short": 0,
        "truncated": 0,
        "samples": 3,
        "batches": 3,
        "tokens": 21,
        "padding": 0,
        "shortest": 5,
        "longest": 8,
    }


def test_a_short_last_window_is_dropped_and_counted(source, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(words(0, 8))
    calibration = calibrate(source, str(path))
    assert samples(calibration) == [[BEGIN, *ids(0, 7)]]
    assert calibration.summary["too_short"] == 1


def test_reading_only_the_start_of_a_long_text_gives_the_same_windows(source, tmp_path):
    path = tmp_path / "book.txt"
    # Long gaps make the first guess of characters per token too small.
    path.write_text((" " * 50).join(f"w{i % 60}" for i in range(4000)))
    assert samples(calibrate(source, str(path), samples=3)) == [[BEGIN, *ids(0, 7)], ids(7, 15), ids(15, 23)]


def test_each_text_of_a_list_is_one_sample_cut_to_length(source):
    calibration = calibrate(source, [words(0, 3), words(3, 30), " \n"])
    assert samples(calibration) == [[BEGIN, *ids(0, 3)], [BEGIN, *ids(3, 10)]]
    assert calibration.summary["truncated"] == 1
    assert calibration.summary["blank"] == 1


def test_ready_made_ids_are_used_as_they_are_and_need_no_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    calibration = calibrate(tmp_path, [[5, 6, 7], [8, 9]])
    assert samples(calibration) == [[5, 6, 7], [8, 9]]


def test_ready_made_ids_longer_than_a_sample_are_refused_by_index(source):
    with pytest.raises(CalibrationError, match="item 1 has 9 token ids, more than sequence_length 8"):
        calibrate(source, [[5, 6], list(range(9))])


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["texts", "ids"])
def test_a_table_gives_one_sample_per_row(source, tmp_path, ending, kind):
    values = [words(0, 3), words(3, 6)] if kind == "texts" else [[4, 5, 6], [7, 8]]
    path = write_table(tmp_path / f"data.{ending}", "content", values)
    expected = [[BEGIN, *ids(0, 3)], [BEGIN, *ids(3, 6)]] if kind == "texts" else values
    assert samples(calibrate(source, path, column="content")) == expected


def write_table(path: Path, column: str, values: list) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({column: values}), path)
    else:
        path.write_text("".join(json.dumps({column: value}) + "\n" for value in values))
    return str(path)


def test_jsonl_lines_may_be_bare_and_dates_stay_texts(source, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('"w0 w1"\n\n{"text": "2020-01-01 00:00:00"}\n')
    assert samples(calibrate(source, str(path))) == [[BEGIN, 3, 4], [BEGIN, 0, 0]]


def test_a_dataset_is_loaded_by_split_name_and_column(source, tmp_path):
    directory = tmp_path / "corpus"
    for name in ("small", "large"):
        for split in ("train", "test"):
            (directory / name).mkdir(parents=True, exist_ok=True)
            write_table(directory / name / f"{split}.parquet", "body", [f"w{len(name)} w{len(split)} w1"])
    (directory / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n"
            + "".join(f"  - split: {split}\n    path: {name}/{split}.parquet\n" for split in ("train", "test"))
            for name in ("small", "large")
        )
        + "---\n"
    )
    found = calibrate(source, str(directory), name="large", split="test", column="body")
    assert samples(found) == [[BEGIN, 3 + 5, 3 + 4, 3 + 1]]
    for wrong, part in (
        ({"name": "huge"}, "huge"),
        ({"name": "small", "split": "dev"}, "dev"),
        ({"name": "small", "column": "text"}, "no column `text`; its columns: `body`"),
    ):
        with pytest.raises(CalibrationError, match=part):
            calibrate(source, str(directory), **wrong)


def test_a_dataset_id_without_a_network_is_a_clear_error(source, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CalibrationError, match="`nobody/nothing` is no file here, and the hub cannot be reached"):
        calibrate(source, "nobody/nothing")


def test_tables_leave_nothing_on_disk(source, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = write_table(tmp_path / "data.parquet", "text", [words(0, 4)] * 40)
    calibrate(source, path, samples=3)
    assert sorted(os.listdir(tmp_path)) == ["data.parquet"]


def test_joining_runs_over_item_borders_with_a_separator_between(source):
    calibration = calibrate(source, [words(0, 2), words(2, 4), words(4, 6)], concat_size=4, concat_separator=" ; ")
    joined = [BEGIN, *ids(0, 2), SEPARATOR, BEGIN, *ids(2, 4), SEPARATOR, BEGIN, *ids(4, 6)]
    assert samples(calibration) == [joined[:4], joined[4:8], joined[8:]]


def test_ids_can_be_joined_however_long_they_are(source):
    calibration = calibrate(source, [list(range(3, 20)), [20, 21, 22]], concat_size=5)
    assert samples(calibration) == [list(range(3, 8)), list(range(8, 13)), list(range(13, 18)), list(range(18, 23))]


def test_sorting_is_by_length_and_stable(source):
    data = [[5, 1], [6, 1, 1], [7, 1], [8, 1, 1]]
    assert samples(calibrate(source, data, sort="asc")) == [[5, 1], [7, 1], [6, 1, 1], [8, 1, 1]]
    assert samples(calibrate(source, data, sort="desc")) == [[6, 1, 1], [8, 1, 1], [5, 1], [7, 1]]


def test_shuffling_follows_the_seed_and_nothing_else(source):
    data = [[i, 1] for i in range(20)]
    first, again, other = (calibrate(source, data, sort="shuffle", samples=20, seed=seed) for seed in (3, 3, 4))
    assert samples(first) == samples(again)
    assert samples(first) != samples(other)
    assert sorted(samples(first)) == sorted(samples(other)) == data


def test_samples_are_the_first_ones_before_they_are_sorted(source):
    assert samples(calibrate(source, [[5] * 6, [6] * 5, [7] * 4], samples=2, sort="asc")) == [[6] * 5, [5] * 6]


@settings(max_examples=40, deadline=None)
@given(
    data=st.lists(st.lists(st.integers(0, len(WORDS) - 1), min_size=2, max_size=8), min_size=1, max_size=9),
    batch_size=st.integers(1, 5),
)
def test_batches_hold_every_token_once_and_masks_are_exact(source, data, batch_size):
    calibration = calibrate(source, data, batch_size=batch_size)
    assert samples(calibration) == data
    assert [len(batch.input_ids) for batch in calibration.batches][:-1] == [batch_size] * (len(calibration.batches) - 1)
    for batch in calibration.batches:
        assert batch.input_ids.shape == batch.attention_mask.shape
        assert batch.attention_mask.any(dim=0).all(), "a column of padding only"
    real = sum(map(len, data))
    assert calibration.summary["tokens"] == real
    assert calibration.summary["padding"] == sum(b.input_ids.numel() for b in calibration.batches) - real


def test_the_digest_tells_ids_order_borders_and_batching_apart(source):
    variants = [
        calibrate(source, data, batch_size=batch_size).digest
        for data, batch_size in (
            ([[5, 6], [7, 8]], 1),
            ([[5, 6], [7, 9]], 1),
            ([[7, 8], [5, 6]], 1),
            ([[5, 6, 7], [8, 9]], 1),
            ([[5, 6, 7, 8]], 1),
            ([[5, 6], [7, 8]], 2),
        )
    ]
    assert len(set(variants)) == len(variants)
    bytes_hashed = b"".join(n.to_bytes(8, "little") for n in (1, 2, 5, 6, 2, 7, 8))
    assert variants[0] == xxhash.xxh3_128_hexdigest(bytes_hashed)


def test_another_process_prepares_the_same(source, tmp_path):
    path = write_table(tmp_path / "data.jsonl", "text", [words(i, i + 3 + i % 5) for i in range(40)])
    config = CalibrationConfig(data=path, sequence_length=6, min_length=2, samples=30, sort="shuffle", batch_size=4)
    program = (
        "import sys; from pathlib import Path; from tasks.calibration import prepare; "
        "from tasks.job import CalibrationConfig; "
        "print(prepare(CalibrationConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), seed=5).digest)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, config.model_dump_json(), str(source)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == prepare(config, source, seed=5).digest


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ([" ", "\n\t"], ["2 items read, 2 blank, 0 shorter"]),
        (["w1", " ", "w2"], ["3 items read, 1 blank, 2 shorter than min_length 3", "the longest has 2"]),
        ([[]], ["1 items read, 1 blank"]),
        ([[5] * 4, [5, 63, 1]], ["calibration item 1: token 1 is 63", "vocabulary has 63"]),
        (["w1 w2", "w1 \ud800"], ["calibration item 1 holds half of a surrogate pair"]),
    ],
)
def test_unusable_data_is_refused_with_counts_and_index(source, data, parts):
    with pytest.raises(CalibrationError) as error:
        calibrate(source, data, min_length=3)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (['{"text": "w1 w2"}', '{"text": 5}'], "line 2 of .* is of type `int`"),
        (['{"text": "w1 w2"}', '{"text": null}'], "line 2 of .* is of type `NoneType`"),
        (['{"text": "w1 w2"}', '{"text": [1, 2]}'], "line 2 of .* is a list of token ids where the first item is a te"),
        (['{"text": [1, 2]}', '{"text": [1, 2.0]}'], r"line 2 of .*: token 1 is 2\.0"),
        (['{"text": "w1 w2"}', "", '{"text": "w1'], "line 3 of .* is not JSON"),
        (['{"body": "w1 w2"}'], "line 1 of .* has no column `text`; its columns: `body`"),
        (["[" * 100000], "line 1 of .* is not JSON"),
    ],
)
def test_a_bad_jsonl_line_is_named(source, tmp_path, lines, part):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(CalibrationError, match=part):
        calibrate(source, str(path))


def test_a_bad_parquet_row_or_file_is_named(source, tmp_path):
    path = write_table(tmp_path / "data.parquet", "text", ["w1 w2", None])
    with pytest.raises(CalibrationError, match=r"row 1 of `.*data\.parquet` is of type `NoneType`"):
        calibrate(source, path)
    with pytest.raises(CalibrationError, match="has no column `body`; its columns: `text`"):
        calibrate(source, path, column="body")
    Path(path).write_bytes(b"PAR1 is not enough")
    with pytest.raises(CalibrationError, match=r"data\.parquet` cannot be loaded"):
        calibrate(source, path)


def test_text_that_is_not_utf8_is_refused(source, tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"w1 \xff\xfe")
    with pytest.raises(CalibrationError, match="not UTF-8"):
        calibrate(source, str(path))


def test_problems_with_the_file_are_told_without_reading_it(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "table.csv").write_text("text\n")
    (tmp_path / "fine.jsonl").write_text("not read")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")

    def problem(name: str) -> str:
        return "; ".join(source_problems(CalibrationConfig(data=str(tmp_path / name))))

    assert "does not exist" in problem("absent.txt")
    assert "does not exist" in problem("deep/absent")
    assert "is empty" in problem("empty.txt")
    assert "ends in `.csv`" in problem("table.csv")
    assert "not a regular file" in problem("pipe.txt")
    assert problem("fine.jsonl") == problem("folder") == ""
    assert source_problems(CalibrationConfig(data="owner/dataset")) == []
    assert "does not exist" in source_problems(CalibrationConfig(data="absent.parquet"))[0]


def test_preparing_from_a_bad_file_says_the_same(source, tmp_path):
    with pytest.raises(CalibrationError, match="does not exist"):
        calibrate(source, str(tmp_path / "absent.jsonl"))


def test_a_source_without_a_tokenizer_is_named_and_ids_are_offered(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    with pytest.raises(CalibrationError, match=r"holds no tokenizer .* ready-made token ids"):
        calibrate(tmp_path, ["w1 w2 w3"])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CalibrationError, match="cannot be loaded"):
        calibrate(tmp_path, ["w1 w2 w3"])


@pytest.mark.parametrize("config", ["{}", "[]", "no json", '{"vocab_size": "many"}', '{"vocab_size": -5}'])
def test_a_config_without_a_vocabulary_size_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CalibrationError, match=r"config\.json"):
        calibrate(tmp_path, [[1, 2, 3]])
