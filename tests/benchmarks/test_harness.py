import json
from pathlib import Path

import pytest
from harness import Bar, Report, describe, format_table, make_parser, parse, percentile, run

from mini_infer import LLM
from mini_infer.core.errors import ModelNotFoundError


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1.0), (50, 5.0), (51, 6.0), (99, 10.0), (100, 10.0)]
)
def test_percentile_is_a_value_that_was_measured(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(10, 0, -1)], percent) == expected


def test_percentile_of_one_value() -> None:
    assert percentile([7.0], 1) == 7.0


@pytest.mark.parametrize(("value", "met"), [(3.9, True), (3.8999, False), (None, None)])
def test_bar(value: float | None, met: bool | None) -> None:
    assert Bar("scaling", value, 3.9).met is met


@pytest.mark.parametrize(("value", "met"), [(4.0, True), (4.0001, False), (None, None)])
def test_bar_from_above(value: float | None, met: bool | None) -> None:
    bar = Bar("waste", value, at_most=4)
    assert (bar.met, bar.bound) == (met, "at most 4")


def test_engine_options_are_json_or_text() -> None:
    typed = ["--engine", "depth=1", "enforce_eager=true", "dtype=float32", "--threads", "1"]
    arguments = parse(make_parser("Doc."), typed)
    expected = {"depth": 1, "enforce_eager": True, "dtype": "float32"}
    assert dict(arguments.engine) == expected


def test_an_engine_option_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(make_parser("Doc."), ["--engine", "depth"])
    assert "OPTION=VALUE" in capsys.readouterr().err


def test_table_aligns_text_left_and_numbers_right() -> None:
    table = format_table([{"name": "a", "speed": 1234.56}, {"name": "long", "speed": None}])
    assert table.splitlines() == ["name   speed", "a     1234.6", "long       -"]


def test_table_has_every_rows_columns() -> None:
    assert format_table([{"a": 1}, {"b": 2}]).splitlines() == ["a  b", "1  -", "-  2"]


def test_quick_replaces_defaults_but_not_what_was_typed() -> None:
    parser = make_parser("Doc.")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--requests", type=int, default=50)
    quick = {"tokens": 4, "requests": 2}
    arguments = parse(parser, ["--quick", "--requests", "9", "--threads", "1"], **quick)
    assert (arguments.repeats, arguments.tokens, arguments.requests) == (1, 4, 9)


def test_without_quick_the_defaults_stand() -> None:
    arguments = parse(make_parser("Doc.", repeats=5), ["--threads", "1"], repeats=2)
    assert arguments.repeats == 5


@pytest.mark.parametrize("repeats", ["0", "-1", "many"])
def test_counts_are_positive(repeats: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(make_parser("Doc."), ["--repeats", repeats])
    assert "--repeats" in capsys.readouterr().err


def test_a_run_is_described_completely() -> None:
    arguments = parse(make_parser("Doc."), ["--threads", "1", "--seed", "7"])
    with LLM(dry_run=True, max_model_len=64) as llm:
        setup = describe(arguments, llm.engine.config, cache="off", prompt_tokens=5)
    assert setup["lengths"] == {"prompt_tokens": 5}
    assert (setup["prefix cache"], setup["seed"], setup["weights"]) == ("off", 7, "random")
    assert setup["engine"]["max_model_len"] == 64
    assert setup["machine"]["processor"]
    assert setup["machine"]["torch_threads"] == 1
    assert {"python", "torch"} <= set(setup["versions"])
    json.dumps(setup)


def test_report_prints_and_writes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("name", "what it shows", {"model": "m", "lengths": {"in": 3}})
    report.rows.append({"case": "on", "tok/s": 12.34})
    report.bars += [Bar("gain", 2.5, 2.0), Bar("other", 1.0, 2.0), Bar("third", None, 2.0)]
    report.notes.append("a note")
    report.finish(tmp_path / "new" / "name.json")
    printed = capsys.readouterr().out
    assert "lengths        in 3" in printed
    assert "gain: 2.5 (bar: at least 2, met)" in printed
    assert "other: 1 (bar: at least 2, NOT met)" in printed
    assert "third: - (bar: at least 2, not measured)" in printed
    written = json.loads((tmp_path / "new" / "name.json").read_text())
    assert written["rows"] == [{"case": "on", "tok/s": 12.34}]
    assert [bar["met"] for bar in written["bars"]] == [True, False, None]
    assert written["notes"] == ["a note"]


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise ModelNotFoundError("no model 'x'")

    with pytest.raises(SystemExit) as exit_info:
        run(main)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: no model 'x'\n"
