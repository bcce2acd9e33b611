"""DSPy: a program with two predictors, with and without context, which its optimisers can tune."""

import sys

from knowgate.core.frameworks import require_for_script
from knowgate.integrations.decider import open_decider

require_for_script("dspy", extra="dspy")

import dspy
from dspy.utils import DummyLM

from knowgate.integrations.dspy import KnowgateRAG

dspy.configure(lm=DummyLM([{"answer": "an answer"}] * 9))  # stands for your LLM
program = KnowgateRAG(open_decider(), search=lambda question: ["Mira runs the canteen of Balaland."])
for question in sys.argv[1:]:
    made = program(question=question)
    print(question, made.knowgate["retrieve"], made.answer, sep=" | ")
