"""Follow-ups stand alone before anything is decided; what leans on nothing goes through as it is."""

from __future__ import annotations

import pytest

from knowgate.errors import BadInput, ModelError
from knowgate.gates import load_gate
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.questions import Exchange, is_follow_up
from knowgate.pipeline import conversation
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.conversation import MAX_EXCHANGES, Conversation, question_from_messages, rewrite_follow_up

BEFORE = [Exchange("Who wrote Emma?", "Jane Austen")]


class Rewriter(FakeModel):
    """Says one thing whenever it is asked to rewrite, and counts how often."""

    def __init__(self, says="When was Jane Austen born?"):
        super().__init__({"Last question": says, "最后一个问题": says, "Emma": "Jane Austen"})
        self.asked = 0

    def generate(self, prompts, **options):
        self.asked += sum("Last question" in prompt.text for prompt in prompts)
        return super().generate(prompts, **options)


@pytest.mark.parametrize(
    ("text", "leans"),
    [
        ("When was she born?", True),
        ("And 2023?", True),
        ("What about Spain?", True),
        ("那德国呢？", True),
        ("他是哪里人？", True),
        ("Why?", True),
        ("How heavy?", True),
        ("What's NASA?", False),
        ("Who wrote Hamlet?", False),
        ("What is the capital of Spain?", False),
        ("鲁迅的原名是什么？", False),
    ],
)
def test_follow_ups_are_told_from_questions_of_their_own(text, leans):
    assert is_follow_up(text) is leans


def test_a_follow_up_is_rewritten():
    assert rewrite_follow_up(Rewriter(), BEFORE, "When was she born?") == "When was Jane Austen born?"


def test_first_questions_and_those_that_stand_alone_cost_nothing():
    model = Rewriter()
    assert rewrite_follow_up(model, [], "When was she born?") == "When was she born?"
    assert rewrite_follow_up(model, BEFORE, "Who wrote Hamlet?") == "Who wrote Hamlet?"
    assert rewrite_follow_up(model, BEFORE, "Thanks!") == "Thanks!"
    assert model.asked == 0


@pytest.mark.parametrize("says", ["", "Who wrote Emma?", "In 1775.", "The weather is fine."])
def test_what_makes_no_sense_is_replaced_by_both_questions(says):
    assert rewrite_follow_up(Rewriter(says), BEFORE, "When was she born?") == "Who wrote Emma? When was she born?"


def test_a_rewrite_without_end_is_replaced_by_both_questions():
    says = "When was Jane Austen born" + " born" * 10_000 + "?"
    assert rewrite_follow_up(Rewriter(says), BEFORE, "When was she born?") == "Who wrote Emma? When was she born?"


@pytest.mark.parametrize(
    ("error", "rewritten"),
    [
        (BadInput("exceeds the context window"), "When was she born?"),
        (ModelError("no answer"), "Who wrote Emma? When was she born?"),
    ],
)
def test_an_llm_that_cannot_rewrite_stops_no_conversation(monkeypatch, error, rewritten):
    def fail(*_args, **_options):
        raise error

    model = Rewriter()
    monkeypatch.setattr(model, "generate", fail)
    assert rewrite_follow_up(model, BEFORE, "When was she born?") == rewritten


def test_a_rewrite_must_be_a_question_that_keeps_the_words_of_the_follow_up():
    before = [Exchange("How much is the Falcon 2 tent per night?", "19 euros")]
    joined = "How much is the Falcon 2 tent per night? And how heavy is it?"
    for says in ("The Falcon 2 tent is 19 euros per night.", "How much is the Falcon 2 tent?", "How heavy?"):
        assert rewrite_follow_up(Rewriter(says), before, "And how heavy is it?") == joined
    says = "How heavy is the Falcon 2 tent?"
    assert rewrite_follow_up(Rewriter(says), before, "And how heavy is it?") == says


def test_joined_questions_do_not_grow_without_end():
    before = [Exchange("Who wrote Emma? When? Where? Why?", "unknown")]
    assert rewrite_follow_up(Rewriter(""), before, "And how?") == "Who wrote Emma? Why? And how?"


def test_a_follow_up_to_a_follow_up_is_joined_with_the_question_that_stands_alone():
    before = [Exchange("Who wrote Emma?", "Jane Austen"), Exchange("And Persuasion?", "the same")]
    joined = "Who wrote Emma? And Persuasion? And Jane Eyre?"
    assert rewrite_follow_up(Rewriter(""), before, "And Jane Eyre?") == joined


def test_a_conversation_remembers_what_was_said():
    talk = Conversation(AdaptiveRAG(Rewriter(), load_gate("never")))
    talk.ask("Who wrote Emma?")
    second = talk.ask("When was she born?")
    assert (second.question.text, second.question.meta["asked"]) == ("When was Jane Austen born?", "When was she born?")
    assert talk.exchanges[0] == Exchange("Who wrote Emma?", "Jane Austen")


def test_messages_of_a_chat_are_a_conversation():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who wrote Emma?"},
        {"role": "assistant", "content": "Jane Austen"},
        {"role": "user", "content": "When was she born?"},
    ]
    assert question_from_messages(Rewriter(), messages).text == "When was Jane Austen born?"


@pytest.mark.parametrize(
    "messages", [[], [{"role": "assistant", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": " "}]]
)
def test_messages_without_a_question_are_refused(messages):
    with pytest.raises(BadInput, match="message"):
        question_from_messages(Rewriter(), messages)


class PromptRecorder(Rewriter):
    """Keeps the prompts, and rewrites nothing, so that questions are joined."""

    def __init__(self):
        super().__init__("")
        self.prompts = []

    def generate(self, prompts, **options):
        self.prompts += [prompt.text for prompt in prompts]
        return super().generate(prompts, **options)


def chat_after(question, answer, last="And when was she born?"):
    turns = [("user", question), ("assistant", answer), ("user", last)]
    return [{"role": role, "content": content} for role, content in turns]


def test_earlier_messages_that_are_too_long_for_a_question_are_not_joined():
    model = PromptRecorder()
    question = question_from_messages(model, chat_after("Who wrote Emma? " * 2_000, "Jane Austen"))
    assert (question.text, question.meta, model.prompts) == ("And when was she born?", {}, [])


def test_the_length_of_an_earlier_question_counts_after_normalization():
    expanding = "\ufdfa" * 2_000  # becomes 36,000 characters
    assert question_from_messages(PromptRecorder(), chat_after(expanding, "Jane")).meta == {}


def test_only_the_last_earlier_questions_are_checked(monkeypatch):
    checked = []
    monkeypatch.setattr(conversation, "is_too_long", checked.append)
    messages = [message for number in range(100) for message in chat_after(f"Who wrote book {number}?", "Jane")[:2]]
    question_from_messages(PromptRecorder(), [*messages, {"role": "user", "content": "When?"}])
    assert checked == [f"Who wrote book {number}?" for number in range(100 - MAX_EXCHANGES, 100)]


def test_of_a_long_earlier_answer_only_the_beginning_is_read():
    model = PromptRecorder()
    question = question_from_messages(model, chat_after("Who wrote Emma?", "Jane Austen " * 100_000))
    assert question.text == "Who wrote Emma? And when was she born?"
    assert len(model.prompts[0]) < 4_000


def test_a_joined_question_is_not_longer_than_a_question_may_be():
    last = "And when was she born, " + "exactly " * 1_500
    assert question_from_messages(PromptRecorder(), chat_after("the novel Emma, " * 700, "Jane", last)).text == last


def test_a_rewritten_question_names_the_messages_that_it_was_made_from():
    question = question_from_messages(Rewriter(), chat_after("Who wrote Emma?", "Jane Austen", "When was she born?"))
    assert question.meta == {"asked": "When was she born?", "earlier": ["Who wrote Emma?"]}
