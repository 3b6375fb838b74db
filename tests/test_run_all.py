"""One summary for all test targets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import run_all
from tests.run_all import Part

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one" time="1.5"/>
<testcase classname="tests.test_a" name="test_two" time="0.5"><failure message="no">trace</failure></testcase>
<testcase classname="tests.test_a" name="test_three" time="0.1"><skipped message="no etcd"/></testcase>
<testcase classname="tests.test_a" name="test_one" time="0.5"><error message="in teardown">trace</error></testcase>
</testsuite></testsuites>"""


def test_a_report_gives_times_failures_and_skips() -> None:
    times, failed, skipped = run_all.parse_report(REPORT)
    assert times == {"tests.test_a::test_one": 2.0, "tests.test_a::test_two": 0.5, "tests.test_a::test_three": 0.1}
    assert failed == ("tests.test_a::test_two", "tests.test_a::test_one")
    assert skipped == 1


def test_a_report_of_an_interrupted_run_has_an_error_without_a_class() -> None:
    report = '<testsuite><testcase name="interrupted"><error message="^C"/></testcase></testsuite>'
    assert run_all.parse_report(report) == ({"interrupted": 0.0}, ("interrupted",), 0)


def test_the_summary_has_parts_slowest_and_failed_tests_and_ends_with_the_counts() -> None:
    many = {f"t::test_{number}": float(number) for number in range(20)}
    parts = [Part("test", 0, 61.0, many), Part("test-ray", 2, 5.5, {"t::test_ray": 3.5}, ("t::test_ray",), 0)]
    lines = run_all.summary(parts).splitlines()
    assert "     61.0 s  make test" in lines
    assert "      5.5 s  make test-ray  FAILED" in lines
    assert "     66.5 s  in all" in lines
    slowest = lines[lines.index("Slowest tests:") + 1 :][: run_all.SLOWEST]
    assert slowest[0] == "     19.0 s  t::test_19" and slowest[-1] == "     10.0 s  t::test_10"
    assert "  t::test_ray" in lines
    assert lines[-1] == "20 passed, 1 failed, 0 skipped"


def test_all_targets_run_and_one_that_fails_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[list[str]] = []
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # these tests may run under `make test-all`, too

    def run(command: list[str], *, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        called.append(command)
        report = next(
            option.partition("=")[2] for option in env["PYTEST_ADDOPTS"].split() if option.startswith("--junitxml")
        )
        if command[1] != "test-broken":
            Path(report).write_text(REPORT)
        return subprocess.CompletedProcess(command, 2 if command[1] == "test-broken" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert run_all.main(["test-broken", "test"]) == 1
    assert called == [["make", "test-broken"], ["make", "test"]]
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 2 failed, 1 skipped"
    assert run_all.main(["test"]) == 0
