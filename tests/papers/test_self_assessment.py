from knowgate.gates.prompt import PromptGate
from knowgate.gates.scoring import read_questions
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.papers.self_assessment import SelfAssessor
from knowgate.types import Question

QUESTIONS = [Question(f"Question {i}?", id=str(i), meta={"known": i % 3 == 0}) for i in range(20)]
WORDS = "true/false"


def test_the_auroc_counts_the_pairs_in_which_the_unknown_question_has_more_need():
    model, prompts, gate = FakeModel(), AnswerPrompts(), PromptGate(WORDS)
    needs = gate.score(QUESTIONS, read_questions(model, [gate], QUESTIONS, prompts))
    known = [need for need, question in zip(needs, QUESTIONS, strict=True) if question.meta["known"]]
    unknown = [need for need, question in zip(needs, QUESTIONS, strict=True) if not question.meta["known"]]
    wins = sum((low < high) + 0.5 * (low == high) for low in known for high in unknown)
    assessment = SelfAssessor(model, QUESTIONS).assess_direct(WORDS)
    assert assessment.auroc == wins / (len(known) * len(unknown))
    assert 0 < assessment.auroc < 1


def test_with_one_kind_of_question_there_is_no_auroc():
    known = [question for question in QUESTIONS if question.meta["known"]]
    assert SelfAssessor(FakeModel(), known).assess_direct(WORDS).auroc is None
