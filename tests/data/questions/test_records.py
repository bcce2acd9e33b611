import pytest

from knowgate.data.questions.records import extract_text, find_field, flatten_texts


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ("plain", "plain"),
        (7, "7"),
        (None, ""),
        (True, ""),
        ([], ""),
        ({"question": "a", "other": "b"}, "a"),
        ({"only": "a"}, "a"),
        ({"two": "a", "more": "b"}, ""),
        ([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], "a"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "a"),
        ("{not json", "{not json"),
        ({"content": [{"type": "text", "text": "a"}]}, "a"),
    ],
)
def test_text_is_extracted_from_recorded_values(kept, text):
    assert extract_text(kept) == text


def test_deeply_nested_values_have_no_text():
    deep = "a"
    for _ in range(50):
        deep = {"input": deep}
    assert extract_text(deep) == ""


def test_nested_fields_have_dotted_names():
    record = {"a": {"b": "x", "c": {"d": "y"}}, "e.f": "z", "n": 1}
    assert flatten_texts(record) == {"a.b": "x", "a.c.d": "y", "e.f": "z"}
    assert (find_field(record, "a.c.d"), find_field(record, "e.f"), find_field(record, "a.x")) == ("y", "z", None)
