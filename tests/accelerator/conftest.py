"""Runs the tests of this folder in processes whose accelerator is the pretend one.

A registered device type stays for the life of a process, and `auto` would take it in every other
test. So each file's tests run in a pytest of its own, whose reports are handed on.

With FIRM_ACCELERATOR, such as "cuda", they run on a real one, in the process that collects them.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import device

HERE = Path(__file__).parent
REPORTS = "FIRM_PRETEND_REPORTS"
"""Variable with the file that an inner pytest writes its reports to."""
INSIDE = REPORTS in os.environ or not device.IS_PRETEND

if INSIDE and device.IS_PRETEND:
    device.register()


class _Writer:
    """Writes the reports of an inner pytest for the outer one."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Appends a report as a line of JSON."""
        with Path(os.environ[REPORTS]).open("a") as file:
            print(json.dumps(_as_data(self._config, report)), file=file)


def pytest_configure(config: pytest.Config) -> None:
    """Has an inner pytest write its reports."""
    if REPORTS in os.environ:
        config.pluginmanager.register(_Writer(config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Reports what the inner pytest of a test's file found."""
    if INSIDE or item.path.parent != HERE:  # pytest asks for tests of other folders, too
        return None
    if reason := device.missing():
        item.add_marker(pytest.mark.skip(reason=reason))
        return None
    reports = item.session.stash.setdefault(_REPORTS, {})
    if item.nodeid not in reports:
        reports |= _inner_reports(item)
    hook, config = item.config.hook, item.config
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in reports[item.nodeid]:
        report = hook.pytest_report_from_serializable(config=config, data=data)
        if isinstance(report.longrepr, list):  # of a skip; JSON has no tuples
            report.longrepr = tuple(report.longrepr)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


_REPORTS = pytest.StashKey[dict[str, list[dict[str, Any]]]]()
"""Reports by test."""


def _inner_reports(item: pytest.Item) -> dict[str, list[dict[str, Any]]]:
    """Runs the session's tests of an item's file, and returns their reports by test."""
    names = [each.nodeid for each in item.session.items if each.path == item.path]
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    outer = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    with tempfile.NamedTemporaryFile("r") as file:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *names],
            cwd=item.config.rootpath,
            env={**outer, "OMP_NUM_THREADS": "1", REPORTS: file.name},
            capture_output=True,
            text=True,
        )
        for line in file:
            report = json.loads(line)
            reports[report["nodeid"]].append(report)
    for name, own in reports.items():
        if not own or own[-1]["when"] != "teardown":  # the process ended before
            output = f"{done.stdout}{done.stderr}"[-4000:]
            reason = f"{output}\nthe process ended with {done.returncode}"
            place = (str(item.path), None, name)
            lost = pytest.TestReport(name, place, {}, "failed", reason, "call")
            own.append(_as_data(item.config, lost))
    return reports


def _as_data(config: pytest.Config, report: pytest.TestReport) -> dict[str, Any]:
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    assert isinstance(data, dict)
    return data
