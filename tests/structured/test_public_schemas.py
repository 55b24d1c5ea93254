"""Whatever schema of the public test suite is accepted, outputs fit it, at high temperatures too."""

from __future__ import annotations

import pytest

from tests.structured.public_schemas import run, suite_archive


def test_every_output_fits_its_schema(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    report = run(suite_archive(pytestconfig.cache.mkdir("json-schema-test-suite")), seeds=1)
    assert not report.wrong, "\n".join(report.wrong)
    assert report.num_supported > 750, report.summary
    assert report.num_ended > 0.95 * report.num_outputs, report.summary
    assert all(len(reason) < 500 and "\n" not in reason for reason in report.refused)
