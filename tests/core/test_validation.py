"""Values in error messages, and files that are no files."""

import pytest

from knowgate.core.validation import check_regular_file, format_value
from knowgate.errors import BadInput


def test_errors_about_values_show_no_logins():
    assert format_value("http://me:secret@[::1/v1") == "'http://***@[::1/v1'"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(BadInput, match="is a folder, not a file"):
        check_regular_file(tmp_path)
