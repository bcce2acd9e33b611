"""The gates, chosen by a string such as 'logprob:mean'. To add one: a file here and a line in the table.

From outside the package: an entry point in the group 'knowgate.gates'. Importing this loads none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from knowgate.core.registry import RegistryEntry, find_plugins, load_entry, parse_options, split_spec
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.gate_folder import (
    FITTED_FOLDER_HINT,
    Verdict,
    parse_fitted_spec,
    read_artifact,
    reject_other_folder,
)
from knowgate.gates.artifacts.gate_folder import (
    is_artifact as is_artifact,
)
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.types import Gate, Model

if TYPE_CHECKING:
    from knowgate.gates.fitted_gate import FittedGate


DEFAULT_GATE = "default"  # a gate that comes with knowgate and was fitted on the LLM at hand; else PLAIN
FALLBACK_GATE = "logprob:first"
PACKAGED_GATES = Path(__file__).parent / "packaged"
GATES = {
    "always": RegistryEntry("knowgate.gates.baselines:AlwaysGate", "retrieve for every question", cost="nothing"),
    "never": RegistryEntry("knowgate.gates.baselines:NeverGate", "never retrieve", cost="nothing"),
    "random": RegistryEntry(
        "knowgate.gates.baselines:RandomGate", "retrieve for a random share: the line to beat", cost="nothing"
    ),
    "prompt": RegistryEntry(
        "knowgate.gates.prompt:PromptGate",
        "ask the LLM whether it can answer",
        needs="labels",
        cost="one prefill of 120 tokens",
        paper="Kadavath et al. 2022; DH-ICL 2.1",
    ),
    "logprob": RegistryEntry(
        "knowgate.gates.logprob:LogprobGate",
        "how probable the drafted answer is: first, mean, min, entropy, margin",
        needs="logprobs",
        cost="none when skipping",
        paper="AdaRAGUE 2025",
    ),
    "flare": RegistryEntry(
        "knowgate.gates.logprob:FlareGate",
        "the least probable token of the draft is below theta",
        needs="logprobs",
        cost="none when skipping",
        paper="Jiang et al. 2023",
    ),
    "dhicl": RegistryEntry(
        "knowgate.gates.dhicl:DhiclGate",
        "similar logged questions, shown to the LLM with what it knew, make it expect not to know",
        needs="labels",
        cost="one prefill of 600 tokens",
        extra="local",
        paper="Lv et al. 2025 (DH-ICL)",
    ),
    "skr": RegistryEntry(
        "knowgate.gates.skr:SkrGate",
        "retrieval helped the nearest logged questions more often than it hurt",
        cost="one embedding, one search",
        extra="local",
        paper="Wang et al. 2023 (SKR)",
    ),
    "seakr": RegistryEntry(
        "knowgate.gates.seakr:SeakrGate",
        "20 sampled answers end in hidden states that lie far apart",
        needs="hidden, samples",
        cost="20 sampled answers",
        paper="Yao et al. 2025 (SeaKR)",
    ),
    "selfrag": RegistryEntry(
        "knowgate.gates.prompt:SelfragGate",
        "the LLM's own token [Retrieval] beats [No Retrieval]; for models trained with them",
        needs="labels",
        cost="one prefill of the question",
        paper="Asai et al. 2024 (Self-RAG)",
    ),
}

# gates that must be fitted first, each with the function that does it; a folder made by `knowgate fit` names one
FITTED_GATES = {
    "probe": RegistryEntry(
        "knowgate.gates.hidden_state:ProbeGate",
        "a network reads a middle-layer hidden state as not knowing",
        needs="hidden",
        cost="none when skipping",
        extra="train",
        paper="CBDR 2025",
        fit="knowgate.training.probe:fit_probe",
    ),
    "uar": RegistryEntry(
        "knowgate.gates.hidden_state:UarGate",
        "sources are asked for, or it takes knowledge that changes with time or that the LLM lacks",
        needs="hidden",
        cost="none when skipping",
        extra="train",
        paper="Cheng et al. 2024 (UAR)",
        fit="knowgate.training.uar:fit_uar",
    ),
    "adaptive": RegistryEntry(
        "knowgate.gates.adaptive:AdaptiveGate",
        "the question looks like those that took one or several rounds of retrieval",
        cost="one embedding",
        extra="train",
        paper="Jeong et al. 2024 (Adaptive-RAG)",
        fit="knowgate.training.adaptive:fit_adaptive",
    ),
    "ik": RegistryEntry(
        "knowgate.gates.ik:IkGate",
        "a fine-tuned judge of question and draft (or a head over their embeddings) says No",
        needs="draft",
        cost="one prefill of the judge of 100 tokens",
        extra="train",
        paper="IK 2025",
        fit="knowgate.training.judges.ik:fit_ik",
    ),
    "judge": RegistryEntry(
        "knowgate.gates.answer_judge:JudgeGate",
        "a small fine-tuned judge says that the LLM's answer is wrong; for LLMs of which only text comes back",
        needs="draft",
        cost="one prefill of the judge of 70 tokens",
        extra="train",
        paper="ours",
        fit="knowgate.training.judges.answer_judge:fit_answer_judge",
    ),
    "gain": RegistryEntry(
        "knowgate.gates.answer_judge:GainGate",
        "the same judge, asked twice, expects documents to be right where the LLM's answer is not",
        needs="draft",
        cost="two prefills of the judge of 70 tokens",
        extra="train",
        paper="ours",
        fit="knowgate.training.judges.gain:fit_gain",
    ),
    "kbm": RegistryEntry(
        "knowgate.gates.kbm:KbmGate",
        "a fine-tuned judge of the question denies mastery or certainty; also a second look at passages",
        cost="one or two prefills of the judge of 90 tokens",
        extra="train",
        paper="Zhang et al. 2024 (KBM)",
        fit="knowgate.training.judges.kbm:fit_kbm",
    ),
    "fusion": RegistryEntry(
        "knowgate.gates.fusion:FusionGate",
        "all signals of the pass, weighed together, say retrieval will help",
        needs="as fitted",
        cost="as fitted",
        extra="train",
        paper="ours",
        fit="knowgate.training.fusion:fit_fusion",
    ),
}


def load_gate(spec: str, *, plug_in: bool = False) -> Gate:
    """The gate a spec names: 'logprob', 'logprob:mean', 'random:rate=0.3,seed=1', or the folder of a fitted gate,
    with ',verdict=own' behind it where its raw score shall decide.

    plug_in: let a fitted gate decide for another LLM than it was fitted on.
    """
    if (fitted := parse_fitted_spec(spec)) is not None:
        return load_fitted_gate(fitted.folder, plug_in=plug_in, verdict=fitted.verdict)
    name, options = split_spec(spec)
    if name in FITTED_GATES:
        raise BadSetting(
            f"gate '{name}' must be fitted first: knowgate fit {name} --labels RUN --out DIR; then use --gate DIR."
        )
    check_gate_spec(spec)
    cls = _checked(name, load_entry(GATES, "gate", name, "knowgate.gates", also=FITTED_FOLDER_HINT))
    return cls(**parse_options(cls, options, f"gate '{name}'"))


def check_gate_spec(spec: str) -> None:
    """Refuse the folder of something else, unless a gate is called like it."""
    name, _ = split_spec(spec)
    if name not in GATES and name not in find_plugins("knowgate.gates"):
        reject_other_folder(spec)


def load_fitted_gate(folder: str, *, plug_in: bool = False, verdict: Verdict = "need") -> FittedGate:
    """A gate that `knowgate fit` made. verdict: 'own' decides by the raw score at 0.5, not by the calibrated need."""
    artifact = read_artifact(folder)
    name = str(artifact.manifest["gate"]).split(":")[0]
    cls: Any = _checked(name, load_entry(FITTED_GATES, "fitted gate", name, "knowgate.fitted_gates"))
    gate: FittedGate = cls.opened(artifact, plug_in, verdict=verdict)
    return gate


def _checked(name: str, cls: object) -> type[Gate]:
    """What an entry point of another package names may be anything."""
    if not (isinstance(cls, type) and issubclass(cls, Gate)):
        raise BadSetting(f"gate '{name}' is {cls!r}, which is no knowgate.Gate: let it be a class that inherits it.")
    return cls


def default_gate(model: Model, prompts: str | None = None) -> Gate:
    """The packaged gate fitted on this LLM and wording, if there is one, else the first token's probability.

    prompts: fingerprint of the answer prompts; the packaged ones by default.
    """
    wording = load_packaged_templates("answer").fingerprint if prompts is None else prompts
    if model.depth > 0:  # without hidden states no packaged gate can work, and asking a server who it is takes time
        for folder in sorted(path.parent for path in PACKAGED_GATES.glob("*/gate.json")):
            made = read_artifact(folder).manifest
            if (made["model"]["fingerprint"], made["prompts"]) == (model.fingerprint, wording):
                return load_fitted_gate(str(folder))
    return load_gate(FALLBACK_GATE)


def render_gate_table() -> str:
    """The gates as the Markdown table of the README."""
    heads = ("gate", "retrieves when", "needs", "extra cost", "reference")
    named = {f"`{name}`": entry for name, entry in GATES.items()}
    named |= {f"`{name}` (fitted)": entry for name, entry in FITTED_GATES.items()}
    rows = [(name, one.summary, one.needs or "-", one.cost, one.paper or "-") for name, one in named.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))
