"""What a task may name as its data set, and that every worker maps a ticket's index to the same row."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.config import ConfigError, TaskSection
from slipstream.rollout_worker.data.files import JsonLines
from slipstream.rollout_worker.data.rows import Row, Stream, Table
from slipstream.rollout_worker.task.task import Task, load_task
from slipstream.rollout_worker.worker import run
from tests.kit import WORKER, config
from tests.kit.worker import fake, multiply, roll, row, task

datasets = pytest.importorskip("datasets")

QUESTIONS = [{"prompt": f"question {number}", "answer": number} for number in range(5)]


def good(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def task_of(dataset: Any, folder: Path | None = None, **options: Any) -> Task:
    made = Task(dataset=dataset, rewards=[good], **options)
    object.__setattr__(made, "folder", folder)
    return made


def rows_of(dataset: Any, folder: Path | None = None, **options: Any) -> list[dict[str, Any]]:
    made = task_of(dataset, folder, **options)
    assert made.rows.size is not None
    return [dict(made.row_for(index, 0, shuffle=False).columns) for index in range(made.rows.size)]


def write(file: Path, text: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


LINES = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
CSV = "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in QUESTIONS)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", LINES),
        ("rows.jsonl", LINES.rstrip()),
        ("rows.jsonl", "\ufeff\n" + LINES.replace("\n", "\r\n\n")),
        ("rows.ndjson.gz", LINES),
        ("rows.json", LINES),
        ("rows.json", json.dumps(QUESTIONS, indent=2)),
        ("rows.json.gz", "\ufeff" + json.dumps(QUESTIONS)),
        ("rows.csv", CSV),
        ("rows.csv.gz", CSV),
        ("rows.tsv", CSV.replace(",", "\t")),
    ],
)
def test_a_file_is_a_data_set(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path / name, text)
    assert rows_of(name, tmp_path) == QUESTIONS
    assert rows_of(tmp_path / name) == QUESTIONS


def test_parquet_arrow_and_folders_are_data_sets(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(QUESTIONS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([4])}).save_to_disk(tmp_path / "splits")
    write(tmp_path / "one" / "rows.jsonl", LINES)
    write(tmp_path / "one" / "README.md", "as people write")
    write(tmp_path / "hub" / "train.jsonl", LINES)
    write(tmp_path / "hub" / "test.jsonl", json.dumps(QUESTIONS[0]))
    (arrow,) = (file.name for file in (tmp_path / "saved").glob("*.arrow"))
    for name in ("rows.parquet", "saved", f"saved/{arrow}", "splits", "one", "hub"):
        assert rows_of(name, tmp_path) == QUESTIONS, name
    assert rows_of("splits", tmp_path, dataset_split="test") == [QUESTIONS[4]]
    assert rows_of("hub", tmp_path, dataset_split="test") == [QUESTIONS[0]]
    assert rows_of("rows.parquet", tmp_path, dataset_split="train[1:3]") == QUESTIONS[1:3]
    with pytest.raises(ConfigError, match="it has the splits train, test; name one"):
        rows_of("splits", tmp_path, dataset_split="dev")


def test_a_glob_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number, question in reversed(list(enumerate(QUESTIONS))):
        write(tmp_path / f"part-{number}.jsonl", json.dumps(question) + "\n")
    assert rows_of("part-*.jsonl", tmp_path) == QUESTIONS
    write(tmp_path / "part-7.csv", CSV)
    with pytest.raises(ConfigError, match=r"several kinds: part-0.jsonl, .*, part-7.csv; name one kind"):
        rows_of("part-*", tmp_path)


def test_a_split_of_json_lines_is_the_librarys(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", LINES)
    assert rows_of("rows.jsonl", tmp_path, dataset_split="train[:2]") == QUESTIONS[:2]


def test_json_needs_no_further_package_and_others_name_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    write(tmp_path / "rows.jsonl", LINES)
    write(tmp_path / "rows.json", json.dumps(QUESTIONS))
    write(tmp_path / "rows.csv", CSV)
    assert rows_of("rows.jsonl", tmp_path) == rows_of("rows.json", tmp_path) == QUESTIONS
    for name in ("rows.csv", "org/name"):
        with pytest.raises(ConfigError, match=rf"'{name}'\) needs the datasets.*pip install 'slipstream-rl\[data\]'"):
            rows_of(name, tmp_path)


def test_a_relative_path_is_the_task_files_first_and_then_the_working_directorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    file = write(
        tmp_path / "tasks" / "mine.py",
        "from slipstream import Task\n"
        "def good(completions, **columns):\n    return [0.0] * len(completions)\n"
        "task = Task(dataset='rows.jsonl', rewards=[good])\n",
    )
    section = TaskSection(path=f"{file}:task")
    write(tmp_path / "cwd" / "rows.jsonl", LINES)
    rows = load_task(section).rows
    assert rows.size == 5
    write(tmp_path / "tasks" / "rows.jsonl", json.dumps(QUESTIONS[0]))
    assert load_task(section).rows.size == 1


def test_a_task_file_is_imported_without_loading_its_data(tmp_path: Path) -> None:
    """As a child does that runs its tools."""
    calls = []

    def make() -> list[dict[str, Any]]:
        calls.append(1)
        return QUESTIONS

    lazy = task_of(make)
    assert not calls
    assert lazy.rows is lazy.rows
    assert len(calls) == 1
    Task(dataset="no/such/rows.jsonl", rewards=[good])


def test_a_hub_name_goes_to_the_library_with_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return datasets.Dataset.from_list(QUESTIONS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "disable_progress_bars", lambda: asked.append("no bars"))
    assert rows_of("trl-lib/DeepMath-103K") == QUESTIONS
    rows_of("openai/gsm8k", dataset_config="main", dataset_split="test")
    assert asked == [
        "no bars",
        (("trl-lib/DeepMath-103K", None), {"split": "train"}),
        "no bars",
        (("openai/gsm8k", "main"), {"split": "test"}),
    ]


@pytest.mark.parametrize("name", ["rows.xyz", "org/rows.txt", "org/set-v1.5"])
def test_a_name_that_may_be_a_file_s_is_told_as_both(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no hub here")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    says = r"cannot be loaded: ConnectionError.*there is no file of that name \(the kinds are .jsonl"
    with pytest.raises(ConfigError, match=says):
        rows_of(name)


def test_what_the_hub_answers_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [
        ValueError("Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']"),
        ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub"),
    ]

    def load_dataset(*_: Any, **__: Any) -> Any:
        raise errors.pop(0)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    said = r"Task\(dataset='openai/gsm8k'\) cannot be loaded: "
    with pytest.raises(
        ConfigError, match=f"{said}ValueError: Config name is missing.; .*dataset_config and dataset_spl"
    ):
        rows_of("openai/gsm8k")
    with pytest.raises(ConfigError, match=f"{said}ConnectionError: .*give the path of a copy"):
        rows_of("openai/gsm8k")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("row.jsonl", r"there is no such file or folder in {folder} and .*; there is rows.jsonl"),
        ("zzz.parquet", "no such file or folder in .*; there is more.csv, rows.jsonl"),
        ("sub/x", "no such file or folder in {folder}/sub"),
        ("./rows", "no such file or folder in {folder} and .*; there is rows.jsonl"),
        ("*.parquet", "no file matches it in {folder}.*; there is more.csv, rows.jsonl"),
        ("sub/notes.md", "notes.md is of no kind that is known; the kinds are .jsonl, "),
        ("a/b/c", "no such file or folder"),
    ],
)
def test_a_wrong_path_is_one_message_that_names_what_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(write(tmp_path / "cwd" / "empty", "").parent)
    folder = tmp_path / "tasks"
    write(folder / "rows.jsonl", LINES)
    write(folder / "more.csv", CSV)
    write(folder / "sub" / "notes.md", "")
    with pytest.raises(ConfigError, match=message.format(folder=folder)) as caught:
        rows_of(name, folder)
    assert f"Task(dataset={name!r})" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", "prompt,a\nx,1\ny,1,2,3\n", "ParserError: .* Expected 2 fields in line 3, saw 4; fix it"),
        ("rows.csv", "", "EmptyDataError: No columns to parse from file; fix it"),
        ("rows.jsonl", "", "is empty; give at least one row"),
        ("rows.jsonl", "\n  \n", "is empty"),
        ("rows.jsonl", '{"prompt": "a"\n', "rows.jsonl line 1 is not JSON"),
        ("rows.jsonl", '\n\n["prompt"]\n', "rows.jsonl line 3 is a list, not an object"),
        ("rows.json", '{\n"prompt": "a"}', "begins with an object over several lines; give a list of rows"),
        ("rows.json", '["a"]', "is not a list of objects"),
        ("rows.json", "[1,", "cannot be loaded: JSONDecodeError"),
        ("rows.jsonl.gz", None, "cannot be loaded: BadGzipFile"),
        ("rows.parquet", "not parquet", "cannot be loaded"),
    ],
)
def test_a_file_that_is_broken_is_one_message(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is None:
        (tmp_path / name).write_bytes(b"not gzip")
    else:
        write(tmp_path / name, text)
    with pytest.raises(ConfigError, match=message):
        rows_of(name, tmp_path)


def test_json_lines_are_left_in_their_files(tmp_path: Path) -> None:
    """And another file that is put in their place, as editors do, changes nothing."""
    files = [write(tmp_path / "a.jsonl", LINES), write(tmp_path / "b.jsonl.gz", LINES)]
    rows = JsonLines(files)
    write(tmp_path / "new", "{}").replace(files[0])
    assert list(rows) == QUESTIONS * 2
    assert rows[-1] == QUESTIONS[-1]
    assert rows[5] == QUESTIONS[0]
    with pytest.raises(IndexError):
        rows[10]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (5, r"Task\(dataset=...\) is a int; give a list of dicts, a datasets.Dataset"),
        (iter(QUESTIONS), "is a list_iterator, which can be read once only.*give the function that makes it"),
        ((row for row in QUESTIONS), "is a generator, which can be read once only"),
        ({"train": QUESTIONS, "test": QUESTIONS}, r"is a dict with 'train', 'test'; .*dataset\['train'\]"),
        (lambda: iter(()), "is empty"),
        (list, "is empty"),
        (lambda: 1 / 0, "lambda.*fails: ZeroDivisionError"),
        (lambda: 5, "is a int; give"),
        (lambda: iter([["a"]]), "the first row cannot be read: TypeError: it is a list, not a mapping of columns"),
        ([{"messages": [], "answer": 1}], r"no 'prompt' column, it has .*rename_column\('messages', 'prompt'\)"),
        ([{"chosen": "a", "rejected": "b"}], "it is a preference data set"),
    ],
)
def test_a_data_set_that_cannot_be_used_says_why(dataset: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(dataset)


def test_a_split_of_what_is_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset_split='train'.*dataset is a list; leave them out"):
        rows_of(QUESTIONS, dataset_split="train")


def test_none_that_an_arrow_table_fills_in_is_taken_out_of_messages() -> None:
    """The prompts of a table all have the keys that one of them has."""
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "pen"}}}
    other = {"type": "function", "function": {"name": "total", "arguments": {"prices": [1]}}}
    prompts = [
        [{"role": "user", "content": "a"}],
        [{"role": "assistant", "tool_calls": [call, other]}, {"role": "tool", "name": "price", "content": "1"}],
    ]
    rows = [{"prompt": prompt, "answer": None} for prompt in prompts]
    table = datasets.Dataset.from_list(rows)
    assert table[0]["prompt"][0]["tool_calls"] is None
    assert rows_of(table) == rows
    assert rows_of(list(table)) != rows, "None inside a call of a list may be meant"
    streamed = task_of(table.to_iterable_dataset())
    assert [dict(streamed.row_for(index, 0).columns) for index in (0, 1)] == rows


def label(name: str, colour: str | None) -> str:
    """Label.

    Args:
        name: Whose label.
        colour: Its colour.
    """
    return f"{name} in {colour}"


@pytest.mark.parametrize("taken", [list, lambda table: lambda: iter(table)])
async def test_none_that_a_tools_schema_does_not_allow_is_not_shown(taken: Any) -> None:
    """Rows that are taken out of an Arrow table keep its None in the calls of other tools."""

    def few_shot(name: str, /, **arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        shown = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "done"}]
        return {"prompt": [*row()["prompt"], *shown, *row()["prompt"]], "answer": 408}

    rows = [few_shot("multiply", a=2, b=3), few_shot("label", name="pen", colour=None), few_shot("gone", x=1)]
    table = datasets.Dataset.from_list(rows)
    done = await roll(task(dataset=taken(table), tools=[multiply, label]), fake(), tickets=3)
    groups = sorted(done.queue.groups, key=lambda group: group.index)
    prompts = [json.loads(group.rollouts[0].messages.decode("utf-8"))[:4] for group in groups]
    shown = [next(m for m in prompt if m.get("tool_calls"))["tool_calls"][0]["function"] for prompt in prompts]
    by_name = {function["name"]: function["arguments"] for function in shown}
    assert by_name["multiply"] == {"a": 2, "b": 3}
    assert by_name["label"] == {"name": "pen", "colour": None}, "null may be meant"
    assert by_name["gone"]["x"] == 1


def test_null_in_a_file_is_an_argument_but_no_key_of_a_message(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"limit": None}}}
    rows = [{"prompt": [{"role": "assistant", "content": None, "name": None, "tool_calls": [call]}], "answer": None}]
    write(tmp_path / "rows.jsonl", json.dumps(rows[0]))
    assert rows_of("rows.jsonl", tmp_path) == [
        {"prompt": [{"role": "assistant", "tool_calls": [call]}], "answer": None}
    ]


def test_null_in_parts_and_calls_is_no_key_and_in_data_of_the_user_stays() -> None:
    call = {"id": None, "function": {"name": "f", "arguments": {"limit": None}, "strict": None}}
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "image", "text": None, "image": "x.png"}]
    prompt = [
        {"role": "user", "content": parts, "function_call": {"name": None, "arguments": None}},
        {"role": "assistant", "tool_calls": [call], "notes": {"checked": None}},
        {"role": "tool", "content": {"found": None}},
    ]
    (shown,) = rows_of([{"prompt": prompt, "answer": None}])
    assert shown["prompt"] == [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}],
            "function_call": {},
        },
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": {"limit": None}}}],
            "notes": {"checked": None},
        },
        {"role": "tool", "content": {"found": None}},
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("only_calls", [False, True])
def test_null_in_a_column_of_json_is_an_argument(is_streamed: bool, only_calls: bool) -> None:
    """Such a column keeps each object as it was, so no table has filled it up."""
    calls = [{"function": {"name": name, "arguments": {name: None}}} for name in ("limit", "unit")]
    rows = [{"prompt": [{"role": "assistant", "tool_calls": [call]}], "answer": "4"} for call in calls]
    message = {"role": datasets.Value("string"), "tool_calls": datasets.List(datasets.Json())}
    prompts = datasets.List(message if only_calls else datasets.Json())
    features = datasets.Features({"prompt": prompts, "answer": datasets.Value("string")})
    table = datasets.Dataset.from_list(rows, features=features)
    made = task_of(table.to_iterable_dataset() if is_streamed else table)
    assert [dict(made.row_for(index, 0).columns) for index in (0, 1)] == rows


class Counting:
    """An iterable that notes each row that it gives, as (iteration, number)."""

    def __init__(self, rows: int, fails_at: int | None = None) -> None:
        self.rows, self.fails_at = rows, fails_at
        self.given: list[tuple[int, int]] = []
        self.iterations = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.iterations += 1
        for number in range(self.rows):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            self.given.append((self.iterations, number))
            yield {"prompt": f"question {number}", "answer": number}


def stream(source: Counting, keep: int = 4096) -> Stream:
    return Stream(lambda epoch: iter(source), keep=keep)


def place_and_answer(row: Row) -> tuple[int, int, int]:
    return row.epoch, row.number, row.columns["answer"]


@given(st.integers(1, 12), st.integers(1, 20), st.lists(st.integers(0, 40), max_size=30))
def test_a_stream_gives_each_index_its_row_in_whatever_order_they_are_asked_for(
    size: int, keep: int, indices: list[int]
) -> None:
    rows = stream(Counting(size), keep)
    for index in indices:
        epoch, number = divmod(index, size)
        assert place_and_answer(rows.row_for(index, 0, shuffle=True)) == (epoch, number, number)
    if indices and max(indices) >= size:
        assert rows.size == size


def test_a_stream_is_read_once_an_epoch_where_tickets_come_nearly_in_order() -> None:
    source = Counting(100)
    rows = stream(source)
    indices = list(range(300))
    rng = random.Random(0)
    for start in range(0, 300, 20):
        window = indices[start : start + 20]
        rng.shuffle(window)
        indices[start : start + 20] = window
    assert [rows.row_for(index, 0, True).number for index in indices] == [index % 100 for index in indices]
    assert source.iterations == 3
    assert source.given == sorted(source.given)


def test_going_far_back_begins_the_epoch_again() -> None:
    source = Counting(100)
    rows = stream(source, keep=10)
    for index in (50, 45, 20):
        assert rows.row_for(index, 0, True).columns["answer"] == index
    assert source.iterations == 2
    assert len(source.given) == 51 + 21


def test_a_worker_that_comes_late_finds_the_same_row() -> None:
    early, late = stream(Counting(7)), stream(Counting(7))
    rows = [early.row_for(index, 0, True) for index in range(40)]
    assert late.row_for(39, 0, True) == rows[39]
    assert late.row_for(3, 0, True) == rows[3]


def skipping(source: Counting, keep: int) -> Stream:
    return Stream(lambda epoch: iter(source), keep=keep, skip=lambda number: islice(iter(source), number, None))


@given(st.integers(1, 60), st.integers(1, 8), st.lists(st.integers(0, 150), max_size=20))
def test_a_stream_that_can_skip_gives_the_same_rows(size: int, keep: int, indices: list[int]) -> None:
    rows = skipping(Counting(size), keep)
    for index in indices:
        assert place_and_answer(rows.row_for(index, 0, True)) == (*divmod(index, size), index % size)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_worker_that_comes_late_skips_what_the_library_can_skip(shuffled: bool) -> None:
    table = datasets.Dataset.from_list([{"prompt": "a", "answer": number} for number in range(20_000)])
    source = table.to_iterable_dataset()
    source = source.shuffle(seed=1, buffer_size=50) if shuffled else source
    read: list[int] = []

    def note(row: dict[str, Any]) -> dict[str, Any]:
        read.append(row["answer"])
        return row

    answers = [row["answer"] for row in islice(source, 15_000, 15_010)]
    late = task_of(source.map(note))
    _ = late.rows
    assert [late.row_for(index, 0).columns["answer"] for index in range(15_000, 15_010)] == answers
    assert late.row_for(14_990, 0).number == 14_990, "kept"
    assert shuffled or len(read) < 20_000
    assert late.row_for(20_003, 0)[:2] == (1, 3), "the end is found row by row"


def test_each_epoch_of_a_shuffled_stream_has_its_own_order() -> None:
    table = datasets.Dataset.from_list([{"prompt": "a", "answer": number} for number in range(20)])
    made = task_of(table.to_iterable_dataset().shuffle(seed=1, buffer_size=20))
    answers = [made.row_for(index, 0).columns["answer"] for index in range(40)]
    assert sorted(answers[:20]) == sorted(answers[20:]) == list(range(20))
    assert answers[:20] != answers[20:]
    again = task_of(table.to_iterable_dataset().shuffle(seed=1, buffer_size=20))
    assert [again.row_for(index, 0).columns["answer"] for index in (25, 3)] == [answers[25], answers[3]]


def test_a_generator_function_is_called_for_each_epoch() -> None:
    calls = []

    def rows() -> Iterator[dict[str, Any]]:
        calls.append(1)
        yield from QUESTIONS

    made = task_of(rows)
    assert [made.row_for(index, 0).columns["answer"] for index in range(11)] == [0, 1, 2, 3, 4] * 2 + [0]
    assert made.rows.size == 5


def test_a_stream_that_raises_fails_the_row_and_no_row_before_it() -> None:
    rows = stream(Counting(10, fails_at=6))
    for index in (7, 3, 6, 5):
        if index < 6:
            assert rows.row_for(index, 0, True).columns["answer"] == index
        else:
            with pytest.raises(OSError, match="the disk is gone"):
                rows.row_for(index, 0, True)
            assert rows.place_of(index, 0, True) == (0, index)


def test_of_a_stream_that_grows_the_new_rows_are_not_used() -> None:
    lengths = iter([3, 5, 4, 3])
    rows = Stream(lambda epoch: iter(QUESTIONS[: next(lengths)]))
    assert [rows.row_for(index, 0, True).columns["answer"] for index in range(10)] == [0, 1, 2] * 3 + [0]


def test_a_stream_whose_epochs_differ_in_length_says_so() -> None:
    lengths = iter([5, 3])
    rows = Stream(lambda epoch: iter(QUESTIONS[: next(lengths)]))
    rows.row_for(5, 0, True)
    with pytest.raises(ValueError, match="gave 5 rows in its first epoch and 3 in epoch 1: each iteration must give"):
        rows.row_for(9, 0, True)


def test_without_shuffling_rows_come_in_their_order() -> None:
    table = Table(QUESTIONS)
    assert [table.row_for(index, 3, shuffle=False).number for index in range(12)] == [0, 1, 2, 3, 4] * 2 + [0, 1]
    assert [table.place_of(index, 3, shuffle=False) for index in (4, 5)] == [(0, 4), (1, 0)]


async def test_the_worker_takes_the_order_that_the_run_file_says() -> None:
    rows = [row(number=number) for number in range(8)]

    def of_the_row(completions: list[Any], number: list[float], **_: Any) -> list[float]:
        return number

    async def numbers(order: str) -> list[float | None]:
        """Return the row's number of each group, in the order of their tickets."""
        settings = config(WORKER, task={"path": "task.py:task", "order": order}, worker={"episodes": 2})
        done = await roll(task(dataset=rows, rewards=[of_the_row]), fake(), tickets=8, config=settings)
        groups = sorted(done.queue.groups, key=lambda group: group.index)
        return [group.rollouts[0].reward for group in groups]

    assert await numbers("as_given") == list(range(8))
    shuffled = await numbers("shuffled")
    assert sorted(shuffled) == list(range(8)) != shuffled


async def test_a_worker_runs_over_a_stream(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for number in range(3):
            yield row(10 + number, 20)

    done = await roll(task(dataset=rows), fake(), tickets=7)
    assert sorted((group.index, group.epoch) for group in done.queue.groups) == [
        (index, index // 3) for index in range(7)
    ]
    assert {rollout.reward for group in done.queue.groups for rollout in group.rollouts} == {1.0}
    assert done.queue.reports[-1].fingerprint.rows == 3


def test_i9_several_threads_may_read_a_stream_at_once() -> None:
    source = Counting(200)
    rows = stream(source, keep=50)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda index: rows.row_for(index, 0, True), range(400)))
    assert [place_and_answer(row) for row in found] == [(*divmod(index, 200), index % 200) for index in range(400)]


def test_a_worker_ends_at_once_where_the_data_set_is_not_there(tmp_path: Path) -> None:
    """Before it asks the queue for anything: there is none."""
    file = write(
        tmp_path / "mine.py",
        "from slipstream import Task\n"
        "def good(completions, **columns):\n    return [0.0] * len(completions)\n"
        "task = Task(dataset='rows.jsonl', rewards=[good])\n",
    )
    with pytest.raises(ConfigError, match=r"'rows.jsonl'\): there is no such file or folder"):
        run(config(WORKER, task={"path": f"{file}:task"}))
