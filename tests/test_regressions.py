"""docs/regressions.md and the tests that it names stay together."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| (\d+) \| (.+?) \| .*? ?\| (.+?) \|$",
    (ROOT / "docs" / "regressions.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"def (test_regression_\d\d_\w+)", path.read_text(encoding="utf-8"))
}


def test_the_numbers_have_no_gap() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) >= 20


@pytest.mark.parametrize(("number", "right", "tests"), ROWS)
def test_each_case_names_tests_of_its_number(number: str, right: str, tests: str) -> None:
    assert right.endswith(".")
    named = re.findall(r"`(\w+)`", tests)
    assert named
    for name in named:
        assert name in TESTS
        assert name.startswith(f"test_regression_{int(number):02d}_")


def test_each_regression_test_has_a_case() -> None:
    numbers = {int(number) for number, _, _ in ROWS}
    assert {int(name[16:18]) for name in TESTS} <= numbers
