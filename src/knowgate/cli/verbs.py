"""The verbs of the command line: where each lives, what it says of itself, and under which heading."""

from __future__ import annotations

from collections.abc import Mapping

from knowgate.cli.lazy_group import LazyGroup, Verb

START, ASK, MEASURE, FIT, PROVE, TOOLS = "Begin here", "Ask", "Measure", "Fit", "Prove", "Tools"
VERBS = {
    "start": Verb("knowgate.cli.first_run:start", "A guided first run: your documents, your LLM, a proof.", START),
    "ask": Verb("knowgate.cli.ask:ask", "Answer questions, retrieving only where the gate says so.", ASK),
    "decide": Verb("knowgate.cli.ask:decide", "Say for each question whether to retrieve; answer nothing.", ASK),
    "serve": Verb("knowgate.cli.serve:serve", "An OpenAI-compatible server that retrieves only where it must.", ASK),
    "mcp": Verb("knowgate.cli.mcp:mcp", "Tools for agents (Model Context Protocol): decide, search, ask.", ASK),
    "index": Verb(
        "knowgate.cli.index:index", "Build a retrieval index, or update one.", ASK, renamed={"--kind": "--retriever"}
    ),
    "label": Verb("knowgate.cli.label:label", "Sample and grade answers: what does the LLM know?", MEASURE),
    "import-answers": Verb(
        "knowgate.cli.import_answers:import_answers",
        "Make a label run from answers recorded elsewhere.",
        MEASURE,
        renamed={"--llm": "--model"},
    ),
    "report": Verb("knowgate.cli.report:report", "Show the knowledge boundary of label runs.", MEASURE),
    "eval-self": Verb("knowgate.cli.eval_self:eval_self", "Does the LLM know what it knows? (KB-SAT)", MEASURE),
    "prefer": Verb("knowgate.cli.prefer:prefer", "Measure what each passage does to the LLM.", MEASURE),
    "fit": Verb("knowgate.cli.fit:app", "Fit a gate to your LLM from label runs; or a reranker.", FIT),
    "calibrate": Verb("knowgate.cli.calibrate:calibrate_command", "Choose a gate's threshold, with evidence.", FIT),
    "export-judge": Verb(
        "knowgate.cli.export_judge:export_judge_command", "Write a gate's judge as a GGUF file, for llama.cpp.", FIT
    ),
    "eval": Verb("knowgate.cli.eval:eval_", "Compare gates on the same questions.", PROVE),
    "compare": Verb("knowgate.cli.compare:compare", "Hold two evaluations against each other; for CI too.", PROVE),
    "eval-rerank": Verb(
        "knowgate.cli.eval_rerank:eval_rerank",
        "Compare rankers on held-out preferences.",
        PROVE,
        renamed={"--margin": "--rerank-margin"},
    ),
    "sweep": Verb("knowgate.cli.sweep:app", "Vary one setting over recorded rows.", PROVE),
    "replay": Verb("knowgate.cli.replay:replay_command", "What other thresholds would save on logged traffic.", PROVE),
    "refit": Verb("knowgate.cli.refit:refit", "A gate for what is asked now, from the server's log.", FIT),
    "cost": Verb("knowgate.cli.cost:cost_command", "What always, never and gated retrieval cost.", PROVE),
    "demo": Verb("knowgate.cli.demo:demo", "What a gate is worth, told in three minutes.", TOOLS),
    "push": Verb("knowgate.cli.hub:push", "A fitted gate to the Hugging Face hub, or a shared folder.", TOOLS),
    "pull": Verb("knowgate.cli.hub:pull", "A fitted gate from the Hugging Face hub, or a shared folder.", TOOLS),
    "gates": Verb("knowgate.cli.lists:gates", "List the gates.", TOOLS),
    "models": Verb("knowgate.cli.lists:models_app", "List LLM backends and cached weights; fetch weights.", TOOLS),
    "rules": Verb("knowgate.cli.rules:app", "What is decided before the gate: small talk, fresh events.", TOOLS),
    "keys": Verb("knowgate.cli.keys:app", "API keys of the server.", TOOLS),
    "history": Verb("knowgate.cli.history:app", "The log of questions that dhicl and skr learn from.", TOOLS),
    "doctor": Verb("knowgate.cli.doctor:doctor", "Is everything here, and what to type if not.", TOOLS),
}


class Verbs(LazyGroup):
    """All of them."""

    def verbs(self) -> Mapping[str, Verb]:
        return VERBS
