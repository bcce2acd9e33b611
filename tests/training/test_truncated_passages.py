from __future__ import annotations

import pytest

from knowgate.data.preferences import PreferenceFolder, load_common_settings
from knowgate.errors import BadSetting, UnsupportedSignal
from knowgate.models.fake import FakeModel
from knowgate.training.passage_effects import PreferenceLabeler, truncate_passages, truncate_text
from knowgate.training.preference_run import run_preferences
from knowgate.types import Passage
from tests.training.test_passage_effects import VALUES, Table, asked


class Words(FakeModel):
    """A token is two characters."""

    def tokenize(self, text: str) -> list[int]:
        return list(range(-(-len(text) // 2)))


@pytest.mark.parametrize(
    ("text", "cut"), [("abcdefgh", "abcdef"), ("abcdef", "abcdef"), ("abcde", "abcde"), ("abcd", None)]
)
def test_texts_are_truncated_to_the_same_length_or_left_out(text, cut):
    assert truncate_text(Words(), text, 3) == cut


def test_the_title_is_part_of_the_truncated_text():
    found = truncate_passages(Words(), [Passage("1", "text and more", "ab", 7.0), Passage("2", "x")], 4)
    assert found == [Passage("1", "ab\ntext ", score=7.0)]


def test_preferences_are_measured_on_truncated_passages():
    source = Table({"T\nup a": 0.9, "T\ndown": 0.1})
    source.model = Words()
    row = PreferenceLabeler(source, split="train", cut=3).label([asked("q", "up above", "down below", "x")])[0]
    assert [(found.text, found.title) for found in row.candidates] == [("T\nup a", ""), ("T\ndown", "")]
    assert (row.positives, row.negatives) == ((0,), (1,))


def test_truncated_and_whole_preferences_cannot_be_combined(tmp_path):
    folders = [PreferenceFolder(tmp_path / name) for name in ("whole", "cut")]
    run_preferences(folders[0], [asked("q", "up", "down")], PreferenceLabeler(Table(VALUES)), data="d")
    source = Table({"T\nup": 0.9, "T\ndo": 0.1})
    source.model = Words()
    run_preferences(folders[1], [asked("q", "up", "down")], PreferenceLabeler(source, cut=2), data="d")
    with pytest.raises(BadSetting, match="different values of 'cut_to'"):
        load_common_settings(folders)


def test_a_model_without_tokenizer_is_rejected():
    with pytest.raises(UnsupportedSignal, match="`cut` truncates passages with a local tokenizer"):
        truncate_passages(FakeModel(), [Passage("1", "x")], 4)
