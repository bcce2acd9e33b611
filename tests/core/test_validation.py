"""Values in error messages."""

from knowgate.core.validation import format_value


def test_errors_about_values_show_no_logins():
    assert format_value("http://me:secret@[::1/v1") == "'http://***@[::1/v1'"
