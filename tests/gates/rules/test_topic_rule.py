"""Rules that match questions similar to examples."""

import numpy as np
import pytest

from knowgate.errors import BadSetting
from knowgate.gates.rules.rule_set import RuleSet, load_rules
from knowgate.gates.rules.topic_rule import TopicRule


class WordEmbedder:
    """Embeds a text by whether it mentions holidays."""

    def embed(self, texts):
        return np.array([[1.0, 0.0] if "holiday" in text else [0.0, 1.0] for text in texts], dtype=np.float32)


def topic(**changes):
    return TopicRule(**{"name": "holidays", "action": "retrieve", "examples": ("How many holidays?",), **changes})


def test_a_similar_question_matches_and_another_does_not():
    rule = topic()
    rule.__dict__["model"] = WordEmbedder()
    decide = RuleSet((rule,)).decide
    assert decide("Are holidays paid?").reason == "the question is about the topic 'holidays'"
    assert decide("Who wrote Emma?") is None


def test_a_proposed_rule_is_read_back_from_a_rules_file(tmp_path):
    rule = topic(examples=('What is "leave"?',), similarity=0.42)
    (tmp_path / "rules.toml").write_text(rule.to_toml(), encoding="utf-8")
    loaded = load_rules(tmp_path / "rules.toml").rules[-1]
    assert (loaded.name, loaded.action, loaded.examples, loaded.similarity) == (
        "holidays",
        "retrieve",
        ('What is "leave"?',),
        0.42,
    )


@pytest.mark.parametrize(
    ("changes", "message"), [({"examples": ()}, "has no example questions"), ({"similarity": 2.0}, "from -1 to 1")]
)
def test_invalid_topics_are_rejected(changes, message):
    with pytest.raises(BadSetting, match=message):
        topic(**changes)
