"""The whole story with one import: label, fit, calibrate, evaluate, ask.

    python examples/library.py smollm jsonl:questions.jsonl documents tour

Model, questions with gold answers, documents to retrieve from, and a folder for everything that is made. Run it again
and labelling goes on where it stopped. So few questions show the way; for a gate to rely on take a thousand or more.
"""

import sys

import knowgate as kg

MODEL, DATA, DOCS, OUT = sys.argv[1:] or sys.exit(__doc__)

questions = kg.load_questions(DATA, limit=120)
kg.build_index(DOCS, f"{OUT}/index")
model, index = kg.load_model(MODEL), kg.load_retriever(f"{OUT}/index")
parts = {"learn": questions[:45], "tune": questions[45:90], "test": questions[90:]}
runs = {name: kg.label(part, model=model, index=index, out=f"{OUT}/{name}", samples=0) for name, part in parts.items()}

gate = kg.fit("fusion", runs["learn"], out=f"{OUT}/gate", cheap=True)
calibration = kg.calibrate(gate, runs["tune"], retrieval_rate=0.5, held_out=0)
evaluation = kg.evaluate([calibration.gate, "logprob:mean"], runs["test"])
kg.write_report(evaluation, f"{OUT}/report")
rag = kg.AdaptiveRAG(model, calibration.gate, index)
for made in (runs["test"], gate, calibration, evaluation, rag.answer(questions[-1].text)):
    print(made, end="\n\n")
