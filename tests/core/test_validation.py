"""Values in error messages, and files that are no files."""

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from knowgate.core.validation import check_regular_file, format_value, parse_json, parse_retry_after
from knowgate.errors import BadInput


def test_errors_about_values_show_no_logins():
    assert format_value("http://me:secret@[::1/v1") == "'http://***@[::1/v1'"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(BadInput, match="is a folder, not a file"):
        check_regular_file(tmp_path)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 1.5", 1.5),
        ("0\x1f", 0.0),
        ("²", None),
        ("٣", None),
        ("-1", None),
        ("nan", None),
        ("1e3", None),
        ("9" * 400, None),
    ],
)
def test_seconds_to_wait_are_plain_digits(value, seconds):
    assert parse_retry_after(value) == seconds


def test_a_retry_date_becomes_seconds_from_now():
    soon = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    assert parse_retry_after(soon) == pytest.approx(3600, abs=60)
    assert parse_retry_after("Fri, 31 Dec 1999 23:59:59 GMT") == 0.0
    assert parse_retry_after("Fri, 31 Dec 9999 23:59:59 GMT") > 1e10
    assert parse_retry_after("Fri, 31 Dec 2027 23:59:59 -99999999999999") is None


def test_lone_surrogates_of_long_texts_are_replaced():
    value = "x" * 65_530 + "\ud800" * 100_000
    assert parse_json(json.dumps({value: [value]}), "the reply", replace_surrogates=True) == {
        value.replace("\ud800", "\ufffd"): [value.replace("\ud800", "\ufffd")]
    }
